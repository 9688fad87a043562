//! Tests of queues.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn queue(most_running: usize) -> Queue {
    Queue::new(AdmissionConfig { most_running, ..AdmissionConfig::default() })
}

fn entered<const N: usize>(queue: &mut Queue, priorities: [Priority; N]) -> [Ticket; N] {
    priorities.map(|priority| queue.enter(at(0), priority).unwrap())
}

#[test]
fn a_smaller_batch_pauses_tasks_that_resume_before_newcomers() {
    let mut queue = queue(4);
    let [a, b, c, d] = entered(&mut queue, [Priority::Normal; 4]);
    assert_eq!(queue.update(at(0)), [a, b, c, d].map(Change::Start));
    queue.set_heat(Heat::Serious);
    assert_eq!(queue.update(at(1)), [Change::Pause(d), Change::Pause(c)]);
    let late = queue.enter(at(2), Priority::Normal).unwrap();
    let ahead = |queue: &Queue, ticket| queue.place(at(3), ticket);
    assert_eq!(ahead(&queue, c), Some(Place::Waiting { ahead: 0 }));
    assert_eq!(ahead(&queue, late), Some(Place::Waiting { ahead: 2 }));
    queue.set_heat(Heat::Nominal);
    queue.set_room(3);
    assert_eq!(queue.update(at(3)), [Change::Start(c)]);
    queue.set_room(8);
    assert_eq!(queue.update(at(4)), [Change::Start(d)]);
    queue.leave(a);
    assert_eq!(queue.update(at(5)), [Change::Start(late)]);
}

#[test]
fn old_tasks_come_before_more_urgent_newcomers_unless_pinned() {
    let mut queue = queue(1);
    let [running, old] = entered(&mut queue, [Priority::Normal, Priority::Background]);
    queue.update(at(0));
    let newer = queue.enter(at(61), Priority::Interactive).unwrap();
    assert_eq!(queue.order(at(59)), [newer, old]);
    assert_eq!(queue.order(at(61)), [old, newer]);
    let pinned = queue.enter(at(3600), Priority::Pinned).unwrap();
    assert_eq!(queue.update(at(3600)), [Change::Pause(running), Change::Start(pinned)]);
    assert_eq!(queue.place(at(3600), old), Some(Place::Waiting { ahead: 0 }));
}

#[test]
fn pinned_tasks_leave_one_of_two_places() {
    let mut queue = queue(2);
    let [one, other, normal] = entered(&mut queue, [Priority::Pinned, Priority::Pinned, Priority::Normal]);
    assert_eq!(queue.update(at(0)), [Change::Start(one), Change::Start(normal)]);
    // A held task needs no place.
    assert_eq!(queue.hold(at(1), normal, true), Some(Change::Pause(normal)));
    assert_eq!(queue.update(at(1)), [Change::Start(other)]);
}

#[test]
fn only_the_limit_refuses_tasks() {
    let config = AdmissionConfig { most_running: 1, most_waiting: 2, ..AdmissionConfig::default() };
    let mut queue = Queue::new(config);
    for _ in 0..3 {
        queue.enter(at(0), Priority::Background).unwrap();
        queue.update(at(0));
    }
    let refused = queue.enter(at(0), Priority::Background).unwrap_err().to_string();
    assert!(refused.contains("2 background") && refused.contains("most_waiting"), "{refused}");
    queue.enter(at(0), Priority::Normal).unwrap();
}

fn enter(queue: &mut Queue, client: &Client, count: usize) -> Vec<Ticket> {
    queue.enter_all(at(0), Priority::Normal, client, count).unwrap()
}

fn running(queue: &Queue, tickets: &[Ticket]) -> usize {
    tickets.iter().filter(|ticket| queue.place(at(0), **ticket) == Some(Place::Running)).count()
}

#[test]
fn clients_share_the_places_by_weight() {
    for (weight, expected) in [(1, [4, 4]), (3, [2, 6]), (100, [1, 7])] {
        let mut queue = queue(8);
        let (many, heavy) = (Client::new("many"), Client::new("heavy").with_weight(weight));
        let first = enter(&mut queue, &many, 64);
        queue.update(at(0));
        let second = enter(&mut queue, &heavy, 64);
        queue.update(at(0));
        assert_eq!([running(&queue, &first), running(&queue, &second)], expected, "weight {weight}");
        assert_eq!(queue.update(at(0)), [], "places do not go back and forth");
        assert!(second.iter().all(|ticket| queue.leave(*ticket)));
        queue.update(at(0));
        assert_eq!(running(&queue, &first), 8, "a client alone has all places");
    }
}

#[test]
fn a_single_task_of_another_client_starts_at_once() {
    let mut queue = queue(1);
    let first = enter(&mut queue, &Client::new("many"), 64);
    queue.update(at(0));
    let single = enter(&mut queue, &Client::new("single"), 1)[0];
    assert_eq!(queue.order(at(0))[0], single);
    // There is one place, and the client that has it has had no turn yet.
    assert_eq!(queue.update(at(0)), []);
    assert!(queue.served(first[0], 257));
    assert_eq!(queue.update(at(0)), [Change::Pause(first[0]), Change::Start(single)]);
    queue.served(single, 257 + 257);
    assert_eq!(queue.update(at(0)), [Change::Pause(single), Change::Start(first[0])]);
}

#[test]
fn a_queue_that_one_client_fills_keeps_no_other_out() {
    let config = AdmissionConfig { most_running: 2, most_waiting: 8, ..AdmissionConfig::default() };
    let mut queue = Queue::new(config);
    let (many, other) = (Client::new("many"), Client::new("other"));
    enter(&mut queue, &many, 10);
    let mut more = |client, count| queue.enter_all(at(0), Priority::Normal, client, count).map(drop);
    let is_full = |result| matches!(result, Err(ScheduleError::QueueFull { limit: 8, .. }));
    assert!(is_full(more(&many, 1)));
    assert!(is_full(more(&other, 5)), "a part of the queue is four of eight");
    more(&other, 4).unwrap();
    assert!(is_full(more(&other, 1)));
    more(&Client::new("third"), 2).unwrap();
}

#[test]
fn a_client_has_limits_of_its_own() {
    let mut queue = queue(8);
    let client = Client { most_running: Some(2), most_waiting: Some(3), ..Client::new("limited") };
    let tickets = enter(&mut queue, &client, 4);
    queue.update(at(0));
    assert_eq!(running(&queue, &tickets), 2);
    enter(&mut queue, &client, 1);
    let refused = queue.enter_all(at(0), Priority::Normal, &client, 1).unwrap_err();
    assert!(matches!(refused, ScheduleError::ClientQueueFull { limit: 3 }), "{refused}");
    queue.leave(tickets[0]);
    assert_eq!(queue.update(at(0)), [Change::Start(tickets[2])]);
    enter(&mut queue, &Client::new("other"), 1);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// For any sequence of events: no task is lost or runs twice, no more run than may, none waits beside a free place,
    /// and waiting tasks have distinct places.
    #[test]
    fn every_task_runs_or_waits_in_line(
        steps in prop::collection::vec((0u8..11, 0usize..12, 0u64..40), 1..80),
    ) {
        let mut queue = queue(4);
        let clients = [Client::default(), Client::new("a"), Client::new("b").with_weight(3)];
        let (mut there, mut held) = (BTreeMap::new(), BTreeSet::new());
        let mut now = Duration::ZERO;
        for (kind, value, passed) in steps {
            now += at(passed);
            match kind {
                0..=3 => {
                    let client = &clients[value % 3];
                    let tickets = queue.enter_all(now, Priority::ALL[value % 4], client, 1 + value / 6);
                    there.extend(tickets.unwrap().into_iter().map(|ticket| (ticket, false)));
                }
                10 => {
                    if let Some(&ticket) = there.keys().nth(value) {
                        queue.served(ticket, 100 * value);
                    }
                }
                4 => queue.set_room(value),
                5 => queue.set_heat([Heat::Nominal, Heat::Fair, Heat::Serious, Heat::Critical][value % 4]),
                6 | 7 => {
                    if let Some(&ticket) = there.keys().nth(value) {
                        let is_held = !held.remove(&ticket) && held.insert(ticket);
                        let paused = queue.hold(now, ticket, is_held).is_some();
                        prop_assert_eq!(paused, is_held && there[&ticket]);
                        there.entry(ticket).and_modify(|runs| *runs &= !is_held);
                    }
                }
                _ => {
                    if let Some(&ticket) = there.keys().nth(value) {
                        prop_assert!(queue.leave(ticket));
                        there.remove(&ticket);
                        held.remove(&ticket);
                    }
                }
            }
            for change in queue.update(now) {
                let (ticket, runs) = match change {
                    Change::Start(ticket) => (ticket, true),
                    Change::Pause(ticket) => (ticket, false),
                };
                prop_assert_eq!(there.insert(ticket, runs), Some(!runs));
            }
            let running = there.values().filter(|runs| **runs).count();
            prop_assert_eq!(queue.running(), running);
            prop_assert_eq!(running, queue.batch().min(there.len() - held.len()));
            prop_assert_eq!(queue.waiting(), there.len() - running);
            for (place, ticket) in queue.order(now).into_iter().enumerate() {
                prop_assert_eq!(there.get(&ticket), Some(&false));
                prop_assert_eq!(queue.place(now, ticket), Some(Place::Waiting { ahead: place }));
            }
        }
    }
}
