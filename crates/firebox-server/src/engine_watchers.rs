//! Counts the clients of the engine's event stream, and records the timeline while there are some.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use firebox_runtime::telemetry::Timeline;

/// A snapshot costs as much as a small request.
pub(crate) const MAX_WATCHERS: usize = 16;
/// Events kept in the timeline while a client watches. A fast small model records a few thousand a second.
const TIMELINE_CAPACITY: usize = 1 << 15;

/// Counts the clients that watch the engine. The timeline records only while there are some.
#[derive(Debug, Clone, Default)]
pub(crate) struct EngineWatchers(Arc<Mutex<WatcherCount>>);

#[derive(Debug, Default)]
struct WatcherCount {
    count: usize,
    /// True if a watcher started the timeline. One started elsewhere keeps recording.
    started_timeline: bool,
}

/// One watcher; dropping it ends its watch.
pub(crate) struct WatcherGuard {
    watchers: EngineWatchers,
    timeline: Timeline,
}

impl EngineWatchers {
    /// Adds a watcher, unless there are too many.
    pub fn enter(&self, timeline: &Timeline) -> Option<WatcherGuard> {
        let mut watchers = self.watchers();
        if watchers.count == MAX_WATCHERS {
            return None;
        }
        watchers.count += 1;
        if !timeline.is_on() {
            timeline.start(TIMELINE_CAPACITY);
            watchers.started_timeline = true;
        }
        Some(WatcherGuard { watchers: self.clone(), timeline: timeline.clone() })
    }

    fn watchers(&self) -> MutexGuard<'_, WatcherCount> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for WatcherGuard {
    fn drop(&mut self) {
        let mut watchers = self.watchers.watchers();
        watchers.count -= 1;
        if watchers.count == 0 && std::mem::take(&mut watchers.started_timeline) {
            self.timeline.stop();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_timeline_records_while_a_client_watches() {
        let (watchers, timeline) = (EngineWatchers::default(), Timeline::default());
        let first = watchers.enter(&timeline).unwrap();
        let began = timeline.now().unwrap();
        let second = watchers.enter(&timeline).unwrap();
        assert!(timeline.now().unwrap() >= began, "it did not begin again");
        drop(first);
        assert!(timeline.is_on());
        drop(second);
        assert!(!timeline.is_on());
        let all: Vec<_> = std::iter::from_fn(|| watchers.enter(&timeline)).collect();
        assert_eq!((all.len(), timeline.is_on()), (MAX_WATCHERS, true));
        drop(all);
        // A timeline started elsewhere keeps recording.
        timeline.start(TIMELINE_CAPACITY);
        drop(watchers.enter(&timeline));
        assert!(timeline.is_on());
    }
}
