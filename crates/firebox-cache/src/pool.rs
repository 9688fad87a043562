//! The pool that the buffers of pages come from and return to.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::arena::Arena;
use crate::error::CacheError;
use crate::layout::{KvType, Layout};
use crate::ledger::{PageLedger, Reclaimable};
use crate::page_buffers::{PAGE_TOKENS, PageBuffers};

/// A pool of pages for sequences of one model. Pages return to it when the last reference is dropped. Clones are handles of
/// the same pool.
#[derive(Debug, Clone)]
pub struct PagePool(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    layout: Layout,
    ledger: Option<Arc<dyn PageLedger>>,
    arena: Arc<Arena>,
    free_list: Mutex<FreeList>,
    /// Asked for pages before a request is refused.
    reclaimables: Mutex<Vec<Weak<dyn Reclaimable>>>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        let free_list = self.free_list.get_mut().unwrap_or_else(PoisonError::into_inner);
        // Dropping the buffers notifies the ledger of their bytes before the pages themselves are reported as freed.
        free_list.free.clear();
        if let Some(ledger) = &self.ledger {
            ledger.freed(free_list.made * PAGE_TOKENS * self.layout.bytes_per_position());
        }
    }
}

#[derive(Debug)]
struct FreeList {
    /// Free buffers, smallest first.
    free: Vec<PageBuffers>,
    /// The number of pages that exist, free ones included.
    made: usize,
    /// The most pages that may exist.
    most: usize,
    /// The number of free pages to retain where a ledger accounts for them.
    reserved: usize,
}

impl FreeList {
    /// Inserts before buffers of equal size, so that the most recently used is reused first and untouched ones stay unallocated.
    fn put(&mut self, buffers: PageBuffers) {
        let at = self.free.partition_point(|other| other.bytes() < buffers.bytes());
        self.free.insert(at, buffers);
    }

    /// Takes the smallest buffer of at least `bytes`, or the largest if none is that large.
    fn pick(&mut self, bytes: usize) -> Option<PageBuffers> {
        let at =
            self.free.partition_point(|buffers| buffers.bytes() < bytes).min(self.free.len().checked_sub(1)?);
        Some(self.free.remove(at))
    }
}

impl PagePool {
    /// Creates a pool that makes pages on demand and retains them.
    pub fn new(layout: Layout) -> Self {
        Self::with_free_list(layout, FreeList { free: Vec::new(), made: 0, most: usize::MAX, reserved: 0 })
    }

    /// Creates a pool of a fixed number of pages, all made now.
    pub fn with_pages(layout: Layout, pages: usize) -> Self {
        let pool =
            Self::with_free_list(layout, FreeList { free: Vec::new(), made: 0, most: pages, reserved: 0 });
        pool.reserve(pages, PAGE_TOKENS);
        pool
    }

    /// Creates a pool that makes pages on demand, subject to the ledger's approval.
    pub fn with_ledger(layout: Layout, ledger: Arc<dyn PageLedger>) -> Self {
        let free_list = Mutex::new(FreeList { free: Vec::new(), made: 0, most: usize::MAX, reserved: 0 });
        let (arena, reclaimables) = (Arc::default(), Mutex::default());
        Self(Arc::new(Shared { layout, ledger: Some(ledger), arena, free_list, reclaimables }))
    }

    /// Creates an empty pool for the same model and ledger with another number format. A fixed number of pages is not carried
    /// over, because these pages have another size.
    pub fn with_kv_dtype(&self, kv_dtype: KvType) -> Self {
        self.with_layout(Layout { kv_dtype, ..self.layout().clone() })
    }

    /// Creates an empty pool with the same ledger and another layout.
    pub fn with_layout(&self, layout: Layout) -> Self {
        match &self.0.ledger {
            Some(ledger) => Self::with_ledger(layout, ledger.clone()),
            None => Self::new(layout),
        }
    }

    fn with_free_list(layout: Layout, free_list: FreeList) -> Self {
        let (free_list, reclaimables) = (Mutex::new(free_list), Mutex::default());
        Self(Arc::new(Shared { layout, ledger: None, arena: Arc::default(), free_list, reclaimables }))
    }

    /// Returns whether both are handles of the same pool.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Registers a holder of idle pages, which is asked for one before a sequence is refused and before others evict anything.
    pub fn register_reclaimable(&self, reclaimable: Weak<dyn Reclaimable>) {
        if let Some(ledger) = &self.0.ledger {
            ledger.register_reclaimable(&reclaimable);
        }
        let mut reclaimables = self.reclaimables();
        reclaimables.retain(|reclaimable| reclaimable.strong_count() > 0);
        reclaimables.push(reclaimable);
    }

    /// What its pages hold.
    pub fn layout(&self) -> &Layout {
        &self.0.layout
    }

    /// Bytes of one page over all layers.
    pub(crate) fn page_bytes(&self) -> usize {
        self.bytes_of(PAGE_TOKENS)
    }

    /// Bytes of up to `positions` of a page.
    fn bytes_of(&self, positions: usize) -> usize {
        positions.min(PAGE_TOKENS) * self.layout().bytes_per_position()
    }

    /// The number of pages, free ones included.
    pub fn pages(&self) -> usize {
        self.free_list().made
    }

    /// The number of unreferenced pages.
    pub fn free_pages(&self) -> usize {
        self.free_list().free.len()
    }

    /// Bytes of all pages.
    pub fn bytes(&self) -> usize {
        self.pages() * self.page_bytes()
    }

    /// Makes pages until enough are free for `sequences` of `positions` each, or the limit is reached. Fresh memory is slow to
    /// obtain; sequences do not have to wait for it then.
    pub fn reserve(&self, sequences: usize, positions: usize) {
        let (whole, rest) = (sequences * (positions / PAGE_TOKENS), positions % PAGE_TOKENS);
        let pages = whole + if rest > 0 { sequences } else { 0 };
        let mut free_list = self.free_list();
        free_list.reserved = free_list.reserved.max(pages);
        while free_list.free.len() < pages && self.may_allocate(&free_list) {
            free_list.made += 1;
            let is_whole = |buffers: &&PageBuffers| buffers.bytes() >= self.page_bytes();
            let positions =
                if free_list.free.iter().filter(is_whole).count() < whole { PAGE_TOKENS } else { rest };
            free_list.put(self.buffers_with(positions));
        }
    }

    /// Drops all free pages.
    pub fn shrink(&self) {
        let mut free_list = self.free_list();
        let gone = std::mem::take(&mut free_list.free).len();
        free_list.made -= gone;
        if let Some(ledger) = &self.0.ledger {
            ledger.freed(gone * self.page_bytes());
        }
    }

    fn buffers_with(&self, positions: usize) -> PageBuffers {
        PageBuffers::with_positions(positions, self.layout(), &self.0.arena, self.0.ledger.as_ref())
    }

    fn may_allocate(&self, free_list: &FreeList) -> bool {
        let paid = || self.0.ledger.as_ref().is_none_or(|ledger| ledger.may_allocate(self.page_bytes()));
        free_list.made < free_list.most && paid()
    }

    /// Takes the buffers of a page that will first hold `positions`.
    pub(crate) fn take_buffers(&self, positions: usize) -> Result<PageBuffers, CacheError> {
        loop {
            if let Some(buffers) = self.take_idle_buffers(positions) {
                return Ok(buffers);
            }
            if self.reclaim_from_others() || self.reclaim_page() {
                continue;
            }
            let mut free_list = self.free_list();
            // Another thread may have returned a page in the meantime.
            return match free_list.pick(self.bytes_of(positions)) {
                Some(buffers) => Ok(buffers),
                None if !self.may_allocate(&free_list) => {
                    Err(CacheError::PoolExhausted { pages: free_list.made })
                }
                None => {
                    free_list.made += 1;
                    drop(free_list);
                    Ok(PageBuffers::new(self.layout(), &self.0.arena, self.0.ledger.as_ref()))
                }
            };
        }
    }

    /// Takes the buffers of a page if they are available without evicting anything.
    pub(crate) fn take_idle_buffers(&self, positions: usize) -> Option<PageBuffers> {
        let mut free_list = self.free_list();
        match free_list.pick(self.bytes_of(positions)) {
            Some(buffers) => Some(buffers),
            None if !self.has_headroom(&free_list) || !self.may_allocate(&free_list) => None,
            None => {
                free_list.made += 1;
                drop(free_list);
                Some(PageBuffers::new(self.layout(), &self.0.arena, self.0.ledger.as_ref()))
            }
        }
    }

    fn has_headroom(&self, free_list: &FreeList) -> bool {
        let paid = || self.0.ledger.as_ref().is_none_or(|ledger| ledger.has_headroom(self.page_bytes()));
        free_list.made < free_list.most && paid()
    }

    fn reclaim_from_others(&self) -> bool {
        self.0.ledger.as_ref().is_some_and(|ledger| ledger.reclaim_from_others())
    }

    /// Asks registered holders for a page. The free list is not locked meanwhile, because the page returns to it.
    fn reclaim_page(&self) -> bool {
        self.live_reclaimables().iter().any(|reclaimable| reclaimable.reclaim_page())
    }

    pub(crate) fn reclaim_all(&self) {
        self.live_reclaimables().iter().for_each(|reclaimable| reclaimable.reclaim_all());
    }

    fn live_reclaimables(&self) -> Vec<Arc<dyn Reclaimable>> {
        self.reclaimables().iter().filter_map(Weak::upgrade).collect()
    }

    pub(crate) fn release(&self, buffers: PageBuffers) {
        let mut free_list = self.free_list();
        match &self.0.ledger {
            Some(ledger) if free_list.free.len() >= free_list.reserved => {
                free_list.made -= 1;
                drop(buffers);
                ledger.freed(self.page_bytes());
            }
            _ => free_list.put(buffers),
        }
    }

    fn reclaimables(&self) -> MutexGuard<'_, Vec<Weak<dyn Reclaimable>>> {
        self.0.reclaimables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn free_list(&self) -> MutexGuard<'_, FreeList> {
        self.0.free_list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
