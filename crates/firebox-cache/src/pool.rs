use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::error::CacheError;
use crate::layout::{KvType, Layout};
use crate::page::{PAGE, Page, Room};

/// Where sequences of one model take pages from, and give them back to when nothing refers to them any more. Clones
/// are the same pool.
#[derive(Debug, Clone)]
pub struct Pool(Arc<Shared>);

/// Is asked before a page is made, and told when one is gone.
pub trait Ledger: std::fmt::Debug + Send + Sync {
    /// Whether a page of so many bytes may be made; if so, it will be.
    fn may_make(&self, bytes: usize) -> bool;
    /// Whether it may be made without anybody giving up anything for it.
    fn has_room(&self, bytes: usize) -> bool;
    /// So many bytes of pages are there no longer.
    fn unmade(&self, bytes: usize);
    /// Pages have come to take so many bytes more of those that were allowed: they take memory as they are filled.
    fn filled(&self, bytes: usize) {
        let _ = bytes;
    }
    /// They take so many bytes less.
    fn emptied(&self, bytes: usize) {
        let _ = bytes;
    }
    /// Somebody has pages of a pool that it allows pages, and is not using them now.
    fn add_spare(&self, spare: &Weak<dyn Spare>) {
        let _ = spare;
    }
    /// Has others whose pages are paid for by the same memory let go of one that nobody is using now, because a sequence finds no
    /// room for one. Returns whether any has. No pool is locked meanwhile.
    fn others_give_up(&self) -> bool {
        false
    }
}

/// Has pages that nobody is using now.
pub trait Spare: std::fmt::Debug + Send + Sync {
    /// Lets go of one. Returns whether it has gone back to its pool.
    fn give_up(&self) -> bool;
    /// Lets go of all, those included that sequences go on reading.
    fn give_up_all(&self);
}

#[derive(Debug)]
struct Shared {
    layout: Layout,
    ledger: Option<Arc<dyn Ledger>>,
    stock: Mutex<Stock>,
    /// Who is asked before anybody is refused.
    spares: Mutex<Vec<Weak<dyn Spare>>>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        let stock = self.stock.get_mut().unwrap_or_else(PoisonError::into_inner);
        // What they took is told of before they are gone.
        stock.free.clear();
        if let Some(ledger) = &self.ledger {
            ledger.unmade(stock.made * PAGE * self.layout.bytes_per_position());
        }
    }
}

#[derive(Debug)]
struct Stock {
    /// Those that take least memory first.
    free: Vec<Room>,
    /// How many pages there are, free ones included.
    made: usize,
    /// How many there may be.
    most: usize,
    /// How many free ones are kept where somebody pays for them.
    reserved: usize,
}

impl Stock {
    /// Before those as large: what was used last is used next, and what never was takes no memory yet.
    fn put(&mut self, room: Room) {
        let at = self.free.partition_point(|other| other.bytes() < room.bytes());
        self.free.insert(at, room);
    }

    /// The smallest that has so many bytes, or the largest where none has.
    fn pick(&mut self, bytes: usize) -> Option<Room> {
        let at = self.free.partition_point(|room| room.bytes() < bytes).min(self.free.len().checked_sub(1)?);
        Some(self.free.remove(at))
    }
}

impl Pool {
    /// A pool that makes pages as they are needed, and keeps them.
    pub fn new(layout: Layout) -> Self {
        Self::with_stock(layout, Stock { free: Vec::new(), made: 0, most: usize::MAX, reserved: 0 })
    }

    /// A pool of so many pages, made now, and no more ever.
    pub fn with_pages(layout: Layout, pages: usize) -> Self {
        let pool = Self::with_stock(layout, Stock { free: Vec::new(), made: 0, most: pages, reserved: 0 });
        pool.reserve(pages, PAGE);
        pool
    }

    /// A pool that makes pages as they are needed, if somebody allows that.
    pub fn with_ledger(layout: Layout, ledger: Arc<dyn Ledger>) -> Self {
        let stock = Mutex::new(Stock { free: Vec::new(), made: 0, most: usize::MAX, reserved: 0 });
        Self(Arc::new(Shared { layout, ledger: Some(ledger), stock, spares: Mutex::default() }))
    }

    /// An empty pool for the same model with keys and values kept in another way, whose pages the same ledger allows. A
    /// number of pages that was set is not taken over: these are of another size.
    pub fn keeping(&self, kept: KvType) -> Self {
        self.with_layout(Layout { kept, ..self.layout().clone() })
    }

    /// The same for pages of any other layout.
    pub fn with_layout(&self, layout: Layout) -> Self {
        match &self.0.ledger {
            Some(ledger) => Self::with_ledger(layout, ledger.clone()),
            None => Self::new(layout),
        }
    }

    fn with_stock(layout: Layout, stock: Stock) -> Self {
        let (stock, spares) = (Mutex::new(stock), Mutex::default());
        Self(Arc::new(Shared { layout, ledger: None, stock, spares }))
    }

    /// Whether both are the same pool.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Asks also `spare` for a page before a sequence is refused one, and before anybody gives up anything else for it.
    pub fn add_spare(&self, spare: Weak<dyn Spare>) {
        if let Some(ledger) = &self.0.ledger {
            ledger.add_spare(&spare);
        }
        let mut spares = self.spares();
        spares.retain(|spare| spare.strong_count() > 0);
        spares.push(spare);
    }

    /// What its pages hold.
    pub fn layout(&self) -> &Layout {
        &self.0.layout
    }

    /// Bytes of one page in all layers together.
    pub(crate) fn page_bytes(&self) -> usize {
        self.bytes_of(PAGE)
    }

    /// Bytes of so many positions of a page.
    fn bytes_of(&self, positions: usize) -> usize {
        positions.min(PAGE) * self.layout().bytes_per_position()
    }

    /// Pages made so far, free ones included.
    pub fn pages(&self) -> usize {
        self.stock().made
    }

    /// Pages that nothing refers to.
    pub fn free_pages(&self) -> usize {
        self.stock().free.len()
    }

    /// Bytes of all pages made so far.
    pub fn bytes(&self) -> usize {
        self.pages() * self.page_bytes()
    }

    /// Makes pages until as many are free as so many sequences of so many positions take, or there are as many as there may
    /// be. A machine takes its time to give memory that was never used, which sequences then do not have to wait for.
    pub fn reserve(&self, sequences: usize, positions: usize) {
        let (whole, rest) = (sequences * (positions / PAGE), positions % PAGE);
        let pages = whole + if rest > 0 { sequences } else { 0 };
        let mut stock = self.stock();
        stock.reserved = stock.reserved.max(pages);
        while stock.free.len() < pages && self.may_make(&stock) {
            stock.made += 1;
            let is_whole = |room: &&Room| room.bytes() >= self.page_bytes();
            let positions = if stock.free.iter().filter(is_whole).count() < whole { PAGE } else { rest };
            stock.put(Room::furnished(positions, self.layout(), self.0.ledger.as_ref()));
        }
    }

    /// Lets go of free pages.
    pub fn shrink(&self) {
        let mut stock = self.stock();
        let gone = std::mem::take(&mut stock.free).len();
        stock.made -= gone;
        if let Some(ledger) = &self.0.ledger {
            ledger.unmade(gone * self.page_bytes());
        }
    }

    fn may_make(&self, stock: &Stock) -> bool {
        let paid = || self.0.ledger.as_ref().is_none_or(|ledger| ledger.may_make(self.page_bytes()));
        stock.made < stock.most && paid()
    }

    /// A page of which so many positions are wanted now.
    pub(crate) fn take(&self, positions: usize) -> Result<Arc<Page>, CacheError> {
        loop {
            if let Some(page) = self.take_idle(positions) {
                return Ok(page);
            }
            if self.others_give_up() || self.give_up_spare() {
                continue;
            }
            let mut stock = self.stock();
            // Another thread may have given one back meanwhile.
            let room = match stock.pick(self.bytes_of(positions)) {
                Some(room) => room,
                None if !self.may_make(&stock) => {
                    return Err(CacheError::PoolExhausted { pages: stock.made });
                }
                None => {
                    stock.made += 1;
                    drop(stock);
                    Room::new(self.layout(), self.0.ledger.as_ref())
                }
            };
            return Ok(Arc::new(Page::new(room, self.clone())));
        }
    }

    /// The same, if there is one for which nobody has to give up anything.
    pub(crate) fn take_idle(&self, positions: usize) -> Option<Arc<Page>> {
        let mut stock = self.stock();
        let room = match stock.pick(self.bytes_of(positions)) {
            Some(room) => room,
            None if !self.has_room(&stock) || !self.may_make(&stock) => return None,
            None => {
                stock.made += 1;
                drop(stock);
                Room::new(self.layout(), self.0.ledger.as_ref())
            }
        };
        Some(Arc::new(Page::new(room, self.clone())))
    }

    fn has_room(&self, stock: &Stock) -> bool {
        let paid = || self.0.ledger.as_ref().is_none_or(|ledger| ledger.has_room(self.page_bytes()));
        stock.made < stock.most && paid()
    }

    fn others_give_up(&self) -> bool {
        self.0.ledger.as_ref().is_some_and(|ledger| ledger.others_give_up())
    }

    /// Gets one page back from whoever has it to spare. The stock is not locked meanwhile: the page goes there.
    fn give_up_spare(&self) -> bool {
        self.living_spares().iter().any(|spare| spare.give_up())
    }

    pub(crate) fn give_up_all(&self) {
        self.living_spares().iter().for_each(|spare| spare.give_up_all());
    }

    fn living_spares(&self) -> Vec<Arc<dyn Spare>> {
        self.spares().iter().filter_map(Weak::upgrade).collect()
    }

    pub(crate) fn give(&self, room: Room) {
        let mut stock = self.stock();
        match &self.0.ledger {
            Some(ledger) if stock.free.len() >= stock.reserved => {
                stock.made -= 1;
                drop(room);
                ledger.unmade(self.page_bytes());
            }
            _ => stock.put(room),
        }
    }

    fn spares(&self) -> MutexGuard<'_, Vec<Weak<dyn Spare>>> {
        self.0.spares.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stock(&self) -> MutexGuard<'_, Stock> {
        self.0.stock.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
