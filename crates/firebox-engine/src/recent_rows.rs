//! What each client has had of a batch's passes lately.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use firebox_schedule::Client;

/// Seconds after which rows count half.
const HALF_LIFE: f64 = 4.0;

/// Rows that count less are forgotten.
const LEAST: f64 = 0.5;

/// How many times the rows of another client one has had if the other goes first.
const AHEAD: f64 = 2.0;

/// Where a client stands among the others.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Standing {
    /// The rows that it has had lately, by its weight.
    pub recent: f64,
    /// The rows that it may have at once because every client that decodes has had many more.
    pub owed: usize,
}

/// Rows that passes have computed for each client, by its weight. Old ones count less and less.
#[derive(Debug, Default)]
pub(crate) struct RecentRows {
    /// The rows, and when they were counted.
    clients: HashMap<Arc<str>, (f64, Duration)>,
}

impl RecentRows {
    /// Counts rows of a pass.
    pub fn add(&mut self, client: &Client, rows: usize, now: Duration) {
        let rows = self.of(client, now) + client.by_weight(rows as f64);
        self.clients.insert(client.name.clone(), (rows, now));
        self.clients.retain(|_, (rows, since)| remaining(*rows, *since, now) >= LEAST);
    }

    /// Returns what a client has had.
    pub fn of(&self, client: &Client, now: Duration) -> f64 {
        self.clients.get(&client.name).map_or(0.0, |(rows, since)| remaining(*rows, *since, now))
    }

    /// Returns where a client stands beside those that decode.
    pub fn standing<'c>(
        &self,
        client: &Client,
        decoding: impl Iterator<Item = &'c Client>,
        now: Duration,
    ) -> Standing {
        let recent = self.of(client, now);
        let least = decoding.map(|other| self.of(other, now)).min_by(f64::total_cmp);
        let more = least.filter(|least| *least > AHEAD * recent).map_or(0.0, |least| least - recent);
        Standing { recent, owed: (more * f64::from(client.weight.max(1))) as usize }
    }
}

fn remaining(rows: f64, since: Duration, now: Duration) -> f64 {
    rows * (-now.saturating_sub(since).as_secs_f64() / HALF_LIFE).exp2()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn rows_count_less_with_time_and_by_weight() {
        let (one, heavy) = (Client::new("one"), Client::new("heavy").with_weight(4));
        let mut recent = RecentRows::default();
        recent.add(&one, 64, SECOND);
        recent.add(&heavy, 64, SECOND);
        assert_eq!((recent.of(&one, SECOND), recent.of(&heavy, SECOND)), (64.0, 16.0));
        let later = SECOND + Duration::from_secs_f64(2.0 * HALF_LIFE);
        recent.add(&one, 4, later);
        assert_eq!((recent.of(&one, later), recent.of(&heavy, later)), (20.0, 4.0));
        recent.add(&one, 1, Duration::from_secs(1000));
        assert_eq!(recent.clients.len(), 1, "the other is forgotten");
    }

    #[test]
    fn a_client_is_owed_what_others_had_more() {
        let [one, many, few] = ["one", "many", "few"].map(Client::new);
        let mut recent = RecentRows::default();
        recent.add(&one, 10, SECOND);
        recent.add(&many, 100, SECOND);
        recent.add(&few, 15, SECOND);
        let owed = |client: &Client, decoding: &[&Client]| {
            recent.standing(client, decoding.iter().copied(), SECOND).owed
        };
        assert_eq!(owed(&one, &[&many]), 90);
        assert_eq!(owed(&one, &[&many, &few]), 0, "one of them is hardly ahead");
        assert_eq!(owed(&many, &[&one]), 0);
        assert_eq!(owed(&one, &[&one, &many]), 0);
        assert_eq!(owed(&one, &[]), 0, "nothing decodes");
        let heavy = Client::new("heavy").with_weight(2);
        assert_eq!(owed(&heavy, &[&many]), 200);
    }
}
