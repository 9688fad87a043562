//! What requests of an API key may have of a model's queue and batch.

use firebox_runtime::schedule::Client;

/// The part of a model that requests of one key get beside those of others, and their most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct KeyShare {
    /// The key's part of the batch and of the queue, relative to that of other keys; 1 if absent.
    pub weight: Option<u32>,
    /// The most requests that run at once; absent for as many as other keys leave. Each choice of a request counts.
    pub running: Option<usize>,
    /// The most requests that wait before another one is refused; absent for the key's part of the queue.
    pub waiting: Option<usize>,
}

impl KeyShare {
    /// Takes what is absent from another share.
    pub fn or(self, other: Self) -> Self {
        Self {
            weight: self.weight.or(other.weight),
            running: self.running.or(other.running),
            waiting: self.waiting.or(other.waiting),
        }
    }

    /// Returns the client that requests in a scope are of.
    pub(crate) fn client(self, scope: &str) -> Client {
        Client {
            most_running: self.running.map(|most| most.max(1)),
            most_waiting: self.waiting,
            ..Client::new(scope).with_weight(self.weight.unwrap_or(1))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_of_a_key_outranks_that_of_every_key() {
        let every = KeyShare { running: Some(0), waiting: Some(9), ..KeyShare::default() };
        let found = |share: KeyShare| {
            let client = share.or(every).client("key");
            (client.weight, client.most_running, client.most_waiting)
        };
        assert_eq!(found(KeyShare::default()), (1, Some(1), Some(9)), "one request always runs");
        let own = KeyShare { weight: Some(3), running: Some(2), waiting: None };
        assert_eq!(found(own), (3, Some(2), Some(9)));
    }
}
