//! The places for connections. When all are taken, the connection that has been idle longest makes room for a new one.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::http::Response;
use hyper::body::{Frame, SizeHint};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

/// Interval at which idle connections are looked for while all places are taken.
const IDLE_CHECK: Duration = Duration::from_millis(100);

/// The places for connections, of which a server has a limited number.
#[derive(Debug)]
pub(crate) struct ClientSlots {
    places: Arc<Semaphore>,
    clients: Mutex<HashMap<u64, Activity>>,
    /// Counts connections and requests, in place of a clock.
    ticks: AtomicU64,
}

/// Whether a connection has a request under way, and since when it has none. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Activity(Arc<ActivityState>);

#[derive(Debug)]
struct ActivityState {
    slots: Arc<ClientSlots>,
    requests: AtomicUsize,
    idle_since: AtomicU64,
    /// Whether the connection is to be closed for another one.
    is_evicted: AtomicBool,
    evicted: Notify,
}

impl Activity {
    /// Marks the connection as busy until the result is dropped.
    pub fn begin_request(&self) -> ActiveRequest {
        self.0.requests.fetch_add(1, Ordering::SeqCst);
        ActiveRequest(self.clone())
    }

    fn is_idle(&self) -> bool {
        self.0.requests.load(Ordering::SeqCst) == 0
    }

    fn idle_since(&self) -> u64 {
        self.0.idle_since.load(Ordering::SeqCst)
    }
}

/// A request under way on a connection, until its response is sent or dropped.
#[derive(Debug)]
pub(crate) struct ActiveRequest(Activity);

impl Drop for ActiveRequest {
    fn drop(&mut self) {
        let state = &self.0.0;
        state.idle_since.store(state.slots.tick(), Ordering::SeqCst);
        state.requests.fetch_sub(1, Ordering::SeqCst);
    }
}

impl ClientSlots {
    pub fn new(most: usize) -> Arc<Self> {
        let places = Arc::new(Semaphore::new(most));
        Arc::new(Self { places, clients: Mutex::default(), ticks: AtomicU64::new(0) })
    }

    /// Waits for a place. If all are taken, closes the connection that has been idle longest; if none is idle, waits until
    /// one closes or is.
    pub async fn acquire(&self) -> OwnedSemaphorePermit {
        loop {
            if let Ok(place) = self.places.clone().try_acquire_owned() {
                return place;
            }
            self.close_idle();
            let place = self.places.clone().acquire_owned();
            if let Ok(Ok(place)) = timeout(IDLE_CHECK, place).await {
                return place;
            }
        }
    }

    fn close_idle(&self) {
        let clients = self.clients();
        if clients.values().any(|client| client.0.is_evicted.load(Ordering::SeqCst)) {
            return;
        }
        let idle = clients.values().filter(|client| client.is_idle());
        if let Some(client) = idle.min_by_key(|client| client.idle_since()) {
            client.0.is_evicted.store(true, Ordering::SeqCst);
            client.0.evicted.notify_one();
        }
    }

    /// Returns the activity of a new connection.
    pub fn activity(self: &Arc<Self>) -> Activity {
        let (slots, idle_since) = (self.clone(), self.tick().into());
        Activity(Arc::new(ActivityState {
            slots,
            requests: AtomicUsize::new(0),
            idle_since,
            is_evicted: AtomicBool::new(false),
            evicted: Notify::new(),
        }))
    }

    /// Adds a connection in its place.
    pub fn enter(self: &Arc<Self>, place: OwnedSemaphorePermit) -> ClientSlot {
        let (id, activity) = (self.tick(), self.activity());
        self.clients().insert(id, activity.clone());
        ClientSlot { id, activity, _place: place }
    }

    fn tick(&self) -> u64 {
        self.ticks.fetch_add(1, Ordering::SeqCst)
    }

    fn clients(&self) -> MutexGuard<'_, HashMap<u64, Activity>> {
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A connection in its place, which is free again when this is dropped.
#[derive(Debug)]
pub(crate) struct ClientSlot {
    id: u64,
    activity: Activity,
    _place: OwnedSemaphorePermit,
}

impl ClientSlot {
    pub fn activity(&self) -> Activity {
        self.activity.clone()
    }

    /// Waits until the place is needed for another connection.
    pub async fn evicted(&self) {
        self.activity.0.evicted.notified().await;
    }
}

impl Drop for ClientSlot {
    fn drop(&mut self) {
        self.activity.0.slots.clients().remove(&self.id);
    }
}

impl ActiveRequest {
    /// Keeps the connection busy until the body of the response is sent.
    pub fn with_response(self, response: Response<Body>) -> Response<Body> {
        response.map(|body| Body::new(ActiveBody { body, _active: self }))
    }
}

/// The body of a response that is being sent.
struct ActiveBody {
    body: Body,
    _active: ActiveRequest,
}

impl HttpBody for ActiveBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
