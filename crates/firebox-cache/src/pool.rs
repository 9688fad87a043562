use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::error::CacheError;
use crate::layout::Layout;
use crate::page::{PAGE, Page, Room};

/// Where sequences of one model take pages from, and give them back to when nothing refers to them any more. Clones
/// are the same pool.
#[derive(Debug, Clone)]
pub struct Pool(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    layout: Layout,
    stock: Mutex<Stock>,
}

#[derive(Debug)]
struct Stock {
    free: Vec<Room>,
    /// How many pages there are, free ones included.
    made: usize,
    /// How many there may be.
    most: usize,
}

impl Pool {
    /// A pool that makes pages as they are needed, and keeps them.
    pub fn new(layout: Layout) -> Self {
        Self::with_stock(layout, Stock { free: Vec::new(), made: 0, most: usize::MAX })
    }

    /// A pool of so many pages, made now, and no more ever.
    pub fn with_pages(layout: Layout, pages: usize) -> Self {
        let pool = Self::with_stock(layout, Stock { free: Vec::new(), made: 0, most: pages });
        pool.reserve(pages);
        pool
    }

    fn with_stock(layout: Layout, stock: Stock) -> Self {
        Self(Arc::new(Shared { layout, stock: Mutex::new(stock) }))
    }

    /// What its pages hold.
    pub fn layout(&self) -> &Layout {
        &self.0.layout
    }

    /// Bytes of one page in all layers together.
    pub fn page_bytes(&self) -> usize {
        PAGE * self.layout().bytes_per_position()
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

    /// Makes pages until so many are free, or there are as many as there may be. A machine takes its time to give memory
    /// that was never used, which sequences then do not have to wait for.
    pub fn reserve(&self, pages: usize) {
        let mut stock = self.stock();
        while stock.free.len() < pages && stock.made < stock.most {
            stock.made += 1;
            stock.free.push(Room::new(self.layout()));
        }
    }

    /// Lets go of free pages.
    pub fn shrink(&self) {
        let mut stock = self.stock();
        stock.made -= stock.free.len();
        stock.free = Vec::new();
    }

    pub(crate) fn take(&self) -> Result<Arc<Page>, CacheError> {
        let mut stock = self.stock();
        let room = match stock.free.pop() {
            Some(room) => room,
            None if stock.made == stock.most => {
                return Err(CacheError::PoolExhausted { pages: stock.most });
            }
            None => {
                stock.made += 1;
                drop(stock);
                Room::new(self.layout())
            }
        };
        Ok(Arc::new(Page::new(room, self.clone())))
    }

    pub(crate) fn give(&self, room: Room) {
        self.stock().free.push(room);
    }

    fn stock(&self) -> MutexGuard<'_, Stock> {
        self.0.stock.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
