use std::ops::Range;
use std::sync::Arc;

use burn::tensor::Tensor;
use firebox_kernels::attend::{Span, Stored};

use crate::error::CacheError;
use crate::layout::{LayerLayout, Layout};
use crate::page::{PAGE, Page};
use crate::pool::Pool;
use crate::recurrent::RecurrentState;
use crate::remembered::Remembered;
use crate::run::{Run, Source};
use crate::turn::{Hidden, Role, Turn, TurnId, TurnKind};

mod beginning;
mod branch;
mod close_up;
mod outline;
mod replay;

pub use beginning::Block;
pub use outline::{Outline, Stretch};
pub use replay::Replay;

/// What a model remembers of one sequence, layer by layer.
///
/// A clone is a branch: it shares all that is remembered, costs next to nothing, and goes on by itself.
///
/// Tokens are counted from the first that is remembered. Their positions are another matter: where tokens were
/// forgotten, positions are left out, until [`close_up`](Self::close_up) takes them up.
#[derive(Debug, Clone)]
pub struct SequenceCache {
    pool: Pool,
    /// All that is remembered, in order, and behind it what a pass is about to add.
    runs: Arc<Vec<Run>>,
    turns: Arc<Vec<Entry>>,
    /// Those of recurrent layers, by layer.
    states: States,
    len: usize,
    position: usize,
    /// Tokens of a pass under way.
    pending: usize,
    next_turn: u64,
    /// How many first tokens went through the layers as if nothing else had ever been there.
    unaltered: usize,
    /// Whether recurrent states have taken in what is not remembered any more.
    mixed: bool,
}

/// States of recurrent layers, by layer.
pub type States = Vec<Option<RecurrentState>>;

/// A turn, and where to go back to.
#[derive(Debug, Clone)]
struct Entry {
    turn: Turn,
    /// Recurrent states before its first token, where the model has any.
    before: Option<Arc<States>>,
}

/// What one layer remembers of a sequence.
#[derive(Debug)]
pub enum LayerCache<'a> {
    /// Keys and values of what is remembered.
    Attention(AttentionCache<'a>),
    /// State of constant size.
    Recurrent(&'a mut RecurrentState),
}

/// Keys and values of one layer.
#[derive(Debug)]
pub struct AttentionCache<'a>(Keeping<'a>);

#[derive(Debug)]
enum Keeping<'a> {
    InPages { sequence: &'a SequenceCache, layer: usize },
    ForThePass(Option<(Tensor<3>, Tensor<3>)>),
}

impl SequenceCache {
    /// A sequence that has not begun.
    pub fn new(pool: &Pool) -> Self {
        Self {
            runs: Arc::default(),
            turns: Arc::default(),
            states: fresh_states(pool.layout()),
            len: 0,
            position: 0,
            pending: 0,
            next_turn: 0,
            unaltered: 0,
            mixed: false,
            pool: pool.clone(),
        }
    }

    /// Where its pages come from.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Tokens that are remembered.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The position of the next token.
    pub fn position(&self) -> usize {
        self.position
    }

    /// The positions of what is remembered, in order.
    pub fn positions(&self) -> impl Iterator<Item = Range<usize>> {
        self.runs.iter().map(|run| run.position..run.end())
    }

    /// Bytes that the pages take that it refers to, those that it shares included.
    pub fn bytes(&self) -> usize {
        let pages = self.runs.iter().filter_map(|run| match &run.source {
            Source::Page(page) => Some((Arc::as_ptr(page), page.bytes())),
            Source::Mapped(_) => None,
        });
        let mut pages: Vec<_> = pages.collect();
        pages.sort_unstable();
        pages.dedup_by_key(|(page, _)| *page);
        pages.into_iter().map(|(_, bytes)| bytes).sum()
    }

    /// Its turns, in order. Tokens that came before any turn was begun belong to a first one.
    pub fn turns(&self) -> impl ExactSizeIterator<Item = &Turn> {
        self.turns.iter().map(|entry| &entry.turn)
    }

    /// The tokens of a turn.
    pub fn tokens_of(&self, turn: TurnId) -> Result<Range<usize>, CacheError> {
        let mut start = 0;
        for held in self.turns() {
            if held.id == turn {
                return Ok(start..start + held.tokens);
            }
            start += held.tokens;
        }
        Err(CacheError::NoSuchTurn { turn })
    }

    /// Which tokens may be seen by those to come, in order.
    pub fn visible(&self) -> impl Iterator<Item = bool> {
        self.turns().flat_map(|turn| std::iter::repeat_n(turn.hidden.is_none(), turn.tokens))
    }

    /// Tokens to come belong to a new turn.
    pub fn begin_turn(&mut self, kind: TurnKind, roles: Vec<Role>) -> TurnId {
        let id = TurnId(self.next_turn);
        self.resume_turn(Turn::new(id, kind, roles));
        id
    }

    /// The same with a turn that was there before: all but its tokens is taken over.
    pub fn resume_turn(&mut self, turn: Turn) {
        let before = self.pool.layout().is_recurrent().then(|| Arc::new(self.states.clone()));
        self.next_turn = self.next_turn.max(turn.id.0 + 1);
        let turns = Arc::make_mut(&mut self.turns);
        turns.retain(|entry| entry.turn.tokens > 0);
        turns.push(Entry { turn: Turn { tokens: 0, ..turn }, before });
    }

    /// Keeps a turn when room is needed, or not.
    pub fn pin(&mut self, turn: TurnId, pinned: bool) -> Result<(), CacheError> {
        self.turn(turn)?.pinned = pinned;
        Ok(())
    }

    /// Notes how much a turn has to do with what is talked about.
    pub fn judge(&mut self, turn: TurnId, relevance: f32) -> Result<(), CacheError> {
        self.turn(turn)?.relevance = relevance;
        Ok(())
    }

    /// Hides a turn from tokens to come, or shows it to them.
    pub fn hide(&mut self, turn: TurnId, hidden: Option<Hidden>) -> Result<(), CacheError> {
        let held = self.turn(turn)?;
        if held.hidden != hidden {
            held.hidden = hidden;
            self.cover();
        }
        Ok(())
    }

    /// Forgets a turn. Returns which tokens those were.
    pub fn forget_turn(&mut self, turn: TurnId) -> Result<Range<usize>, CacheError> {
        let tokens = self.tokens_of(turn)?;
        self.forget(tokens.clone());
        Arc::make_mut(&mut self.turns).retain(|entry| entry.turn.id != turn);
        Ok(tokens)
    }

    /// Forgets some tokens. The rest stays at its positions, and recurrent states keep what they took in.
    pub fn forget(&mut self, tokens: Range<usize>) {
        self.give_up_pass();
        let tokens = tokens.start.min(self.len)..tokens.end.min(self.len);
        if tokens.is_empty() {
            return;
        }
        let (mut runs, mut at) = (Vec::with_capacity(self.runs.len() + 1), 0);
        for run in self.runs.iter() {
            let (from, to) = (at, at + run.len());
            let start = tokens.start.clamp(from, to) - from;
            let end = tokens.end.clamp(from, to) - from;
            let parts = [0..start, end..run.len()];
            runs.extend(parts.into_iter().filter(|part| !part.is_empty()).map(|part| run.part(part)));
            at = to;
        }
        self.runs = Arc::new(runs);
        let mut at = 0;
        Arc::make_mut(&mut self.turns).retain_mut(|entry| {
            let held = at..at + entry.turn.tokens;
            at = held.end;
            let lost = tokens.end.min(held.end).saturating_sub(tokens.start.max(held.start));
            entry.turn.tokens -= lost;
            entry.turn.tokens > 0 || held.is_empty()
        });
        self.len -= tokens.len();
        self.unaltered = self.unaltered.min(tokens.start);
        self.mixed |= self.pool.layout().is_recurrent();
        self.cover();
    }

    /// Goes back to the first `len` tokens. Returns whether that was possible: where the model has recurrent layers,
    /// sequences only go back to where a turn began. Positions go on from where they were then.
    pub fn rewind(&mut self, len: usize) -> bool {
        let whole = self.abandon_pass();
        if len == 0 {
            self.clear();
            return true;
        }
        if len > self.len || (len == self.len && !whole) {
            return false;
        }
        if len == self.len {
            return true;
        }
        if self.pool.layout().is_recurrent() {
            let mut start = 0;
            let mut starts = self.turns.iter().map(|entry| {
                start += entry.turn.tokens;
                (start - entry.turn.tokens, entry)
            });
            let before = starts.find(|(start, entry)| *start == len && entry.turn.tokens > 0);
            match before.and_then(|(_, entry)| entry.before.clone()) {
                Some(before) => self.states = before.as_ref().clone(),
                None => return false,
            }
            self.mixed = len >= self.unaltered;
        }
        self.shorten(len);
        true
    }

    /// Goes back to the first `len` tokens, at most as many as there are, with the [`states`](Self::states) that
    /// recurrent layers had then.
    pub fn go_back(&mut self, len: usize, states: Vec<Option<RecurrentState>>) {
        self.give_up_pass();
        self.states = states;
        if len < self.len {
            self.shorten(len);
        }
    }

    fn shorten(&mut self, len: usize) {
        self.position = self.position_of(len);
        self.keep(len);
        let mut left = len;
        Arc::make_mut(&mut self.turns).retain_mut(|entry| {
            let any = left > 0 && entry.turn.tokens > 0;
            entry.turn.tokens = entry.turn.tokens.min(left);
            left -= entry.turn.tokens;
            any
        });
        self.len = len;
        self.unaltered = self.unaltered.min(len);
    }

    /// Gives up a pass that has not gone through all layers. Returns whether everything is as it was before it: recurrent
    /// states are not.
    pub fn abandon_pass(&mut self) -> bool {
        let torn = self.pending > 0 && self.pool.layout().is_recurrent();
        self.give_up_pass();
        !torn
    }

    /// The same sequence before its first token, with pages of another pool.
    pub fn begun_in(&self, pool: &Pool) -> Self {
        Self { next_turn: self.next_turn, ..Self::new(pool) }
    }

    /// Forgets everything, turns included; pages go back to the pool.
    pub fn clear(&mut self) {
        self.runs = Arc::default();
        self.turns = Arc::default();
        self.states = fresh_states(self.pool.layout());
        (self.len, self.position, self.pending) = (0, 0, 0);
        (self.unaltered, self.mixed) = (0, false);
    }

    /// Recurrent states, by layer.
    pub fn states(&self) -> &[Option<RecurrentState>] {
        &self.states
    }

    /// Everything remembered, run by run, of one layer: nothing where it is recurrent.
    pub fn stored(&self, layer: usize) -> Option<Vec<Remembered>> {
        self.runs.iter().map(|run| run.read(layer)).collect()
    }

    /// Takes room for the tokens of a pass, which every layer fills, unless as much was taken and not filled yet. What a
    /// pass before has taken and not completed is given up.
    pub fn reserve(&mut self, count: usize) -> Result<(), CacheError> {
        // In a clone, what was taken is not its own.
        if count == self.pending && Arc::get_mut(&mut self.runs).is_some() {
            return Ok(());
        }
        self.give_up_pass();
        self.free_slots();
        let taken = self.go_on(count)?;
        let runs = Arc::make_mut(&mut self.runs);
        let (mut rest, mut position) = (count - taken, self.position + taken);
        self.pending = count;
        while rest > 0 {
            let page = match self.pool.take(rest) {
                Ok(page) => page,
                Err(error) => {
                    self.give_up_pass();
                    return Err(error);
                }
            };
            let taken = page.claim(0, rest);
            runs.push(Run::new(Source::Page(page), 0..taken, position));
            (rest, position) = (rest - taken, position + taken);
        }
        self.cover();
        Ok(())
    }

    /// Takes the slots behind the last tokens in their page, for `count` tokens at most. Returns how many.
    fn go_on(&mut self, count: usize) -> Result<usize, CacheError> {
        loop {
            self.own_last()?;
            let position = self.position;
            let last = Arc::make_mut(&mut self.runs).last_mut().filter(|last| last.end() == position);
            let Some(Run { source: Source::Page(page), slots, .. }) = last else { return Ok(0) };
            let taken = page.claim(slots.end, count);
            slots.end += taken;
            // Somebody else may have gone on there since it was looked at, and then it is copied.
            if taken > 0 || count == 0 || slots.end == PAGE {
                return Ok(taken);
            }
        }
    }

    /// Where the last tokens end within a block and those to come cannot follow them, has a page that they can: what others do
    /// must not be seen in where tokens lie, because that is how the last bits are rounded.
    fn own_last(&mut self) -> Result<(), CacheError> {
        self.copy_last().or_else(|_| {
            // Whoever keeps the page for others lets go of it, if that is all it takes.
            self.pool.give_up_all();
            self.free_slots();
            self.copy_last()
        })
    }

    /// Copies the last block where it is mapped, kept for others, or has others go on in it.
    fn copy_last(&mut self) -> Result<(), CacheError> {
        let Some(last) = self.runs.last().filter(|last| last.end() == self.position) else { return Ok(()) };
        match &last.source {
            Source::Mapped(_) => {
                let Some(slots) = last.in_block().filter(|slots| slots.end < PAGE) else { return Ok(()) };
                let run = self.copied(last, slots.start)?;
                let run = Run { visible: last.visible.clone(), hidden: last.hidden, ..run };
                if let Some(last) = Arc::make_mut(&mut self.runs).last_mut() {
                    *last = run;
                }
            }
            Source::Page(page) if last.slots.end < PAGE && !page.goes_on(last.slots.end) => {
                let (own, last) = (self.copied_page(page, &last.slots)?, last.clone());
                self.go_over(&last, &own);
            }
            Source::Page(_) => {}
        }
        Ok(())
    }

    /// Reads another page than the one that its last runs lie in together.
    fn go_over(&mut self, last: &Run, page: &Arc<Page>) {
        let runs = Arc::make_mut(&mut self.runs).iter_mut().rev();
        for run in runs.take_while(|run| run.lies_with(last)) {
            run.source = Source::Page(page.clone());
        }
    }

    /// A page of its own that holds what another does, up to the end of some slots.
    fn copied_page(&self, from: &Page, slots: &Range<usize>) -> Result<Arc<Page>, CacheError> {
        let page = self.pool.take(slots.end)?;
        page.claim(0, slots.end);
        page.copy(from);
        Ok(page)
    }

    /// Some runs that lie together, where nobody else reads them: at the same places, whether they were shared or in a file, so
    /// that they and what comes next are the same spans as ever.
    fn owned(&self, together: &[Run], alone: bool) -> Result<Vec<Run>, CacheError> {
        let (Some(first), Some(last)) = (together.first(), together.last()) else { return Ok(Vec::new()) };
        let blocks: Option<Vec<Range<usize>>> = together.iter().map(Run::in_block).collect();
        let (page, places) = match (&first.source, blocks) {
            (Source::Page(page), _) if alone && Arc::strong_count(page) == together.len() => {
                return Ok(together.to_vec());
            }
            (Source::Page(page), _) => {
                let places = together.iter().map(|run| run.slots.clone()).collect();
                (self.copied_page(page, &last.slots)?, places)
            }
            (Source::Mapped(_), Some(places)) => {
                let end = places.last().map_or(0, |last| last.end);
                let page = self.pool.take(end)?;
                page.claim(0, end);
                for (run, slots) in together.iter().zip(&places) {
                    self.write_run(&page, slots.start, run);
                }
                (page, places)
            }
            // They are longer than a page is.
            (Source::Mapped(_), None) => {
                let parts = together.iter().flat_map(|run| {
                    let starts = (0..run.len()).step_by(PAGE);
                    starts.map(|start| run.part(start..run.len().min(start + PAGE)))
                });
                return parts.map(|part| self.copied(&part, 0)).collect();
            }
        };
        let own = |(run, slots): (&Run, Range<usize>)| Run {
            source: Source::Page(page.clone()),
            slots,
            ..run.clone()
        };
        Ok(together.iter().zip(places).map(own).collect())
    }

    /// The same keys and values in a page of their own, from `slot` on.
    fn copied(&self, run: &Run, slot: usize) -> Result<Run, CacheError> {
        let page = self.pool.take(slot + run.len())?;
        let slots = slot..page.claim(0, slot + run.len());
        self.write_run(&page, slot, run);
        Ok(Run::new(Source::Page(page), slots, run.position))
    }

    /// Writes what a run holds to a page, from a slot on.
    fn write_run(&self, page: &Page, slot: usize, run: &Run) {
        for layer in 0..self.pool.layout().layers.len() {
            if let Some(held) = run.read(layer) {
                page.write(layer, slot, held);
            }
        }
    }

    /// The cache of one layer.
    ///
    /// # Panics
    /// If the model has no such layer.
    pub fn layer(&mut self, index: usize) -> LayerCache<'_> {
        if self.states[index].is_none() {
            return LayerCache::Attention(AttentionCache(Keeping::InPages { sequence: self, layer: index }));
        }
        LayerCache::Recurrent(self.states[index].get_or_insert_default())
    }

    /// The tokens that room was reserved for have passed through all layers.
    pub fn advance(&mut self) {
        let goes_on = self.goes_on_unaltered();
        self.position += self.pending;
        let count = std::mem::take(&mut self.pending);
        self.count(count);
        if goes_on {
            self.unaltered = self.len;
        }
    }

    fn count(&mut self, tokens: usize) {
        if self.turns.is_empty() {
            self.begin_turn(TurnKind::Turn, Vec::new());
        }
        self.len += tokens;
        if let Some(entry) = Arc::make_mut(&mut self.turns).last_mut() {
            entry.turn.tokens += tokens;
        }
    }

    fn turn(&mut self, turn: TurnId) -> Result<&mut Turn, CacheError> {
        let entry = Arc::make_mut(&mut self.turns).iter_mut().find(|entry| entry.turn.id == turn);
        entry.map(|entry| &mut entry.turn).ok_or(CacheError::NoSuchTurn { turn })
    }

    /// The position of a remembered token.
    fn position_of(&self, token: usize) -> usize {
        let mut at = 0;
        for run in self.runs.iter() {
            if token < at + run.len() {
                return run.position + token - at;
            }
            at += run.len();
        }
        self.position
    }

    fn give_up_pass(&mut self) {
        if self.pending > 0 {
            self.pending = 0;
            self.keep(self.len);
        }
    }

    /// Lets go of all runs behind the first `len` tokens.
    fn keep(&mut self, len: usize) {
        let mut left = len;
        Arc::make_mut(&mut self.runs).retain_mut(|run| {
            let kept = run.len().min(left);
            run.slots.end = run.slots.start + kept;
            left -= kept;
            kept > 0
        });
    }

    /// Finds what of every run may be seen.
    fn cover(&mut self) {
        let hides = self.turns().any(|turn| turn.hidden.is_some());
        if !hides && !self.runs.iter().any(|run| run.hidden || run.visible.is_some()) {
            return;
        }
        let mut visible: Vec<bool> = self.visible().collect();
        visible.resize(self.len + self.pending, true);
        let mut at = 0;
        for run in Arc::make_mut(&mut self.runs) {
            let seen = &visible[at..at + run.len()];
            at += run.len();
            run.hidden = !seen.contains(&true);
            run.visible = (!run.hidden && seen.contains(&false)).then(|| seen.iter().copied().collect());
        }
    }
}

impl SequenceCache {
    /// Fills the room of the pass in one layer. `part` hands out what belongs to some of the pass's tokens.
    fn fill(&self, layer: usize, part: impl Fn(Range<usize>) -> Remembered) {
        let Self { runs, len, pending, .. } = self;
        if *pending == 0 {
            return;
        }
        let mut at = 0;
        for run in runs.iter() {
            let (from, to) = (at.max(*len), at + run.len());
            if let (true, Source::Page(page)) = (from < to, &run.source) {
                page.write(layer, run.slots.start + from - at, part(from - len..to - len));
            }
            at = to;
        }
    }
}

impl AttentionCache<'_> {
    /// One that remembers nothing before the pass, and nothing behind it: what it is given stays what it is, gradients
    /// included.
    pub fn for_the_pass() -> Self {
        Self(Keeping::ForThePass(None))
    }

    /// Fills the room of the pass; both tensors are `[kv_heads, tokens of the pass, head_dim]`.
    pub fn append(&mut self, keys: Tensor<3>, values: Tensor<3>) {
        match &mut self.0 {
            Keeping::InPages { sequence, layer } => {
                let kept = sequence.pool.layout().kept;
                let added = Remembered::Attention { keys: kept.store(keys), values: kept.store(values) };
                sequence.fill(*layer, |tokens| added.part(tokens));
            }
            Keeping::ForThePass(held) => *held = Some((keys, values)),
        }
    }

    /// What queries from `position` on may see, if they see `window` positions each, their own included.
    pub fn spans(&self, position: usize, window: Option<usize>) -> Vec<Span> {
        match &self.0 {
            Keeping::InPages { sequence, layer } => {
                let first = window.map_or(0, |window| (position + 1).saturating_sub(window));
                let runs = sequence.runs.iter().filter(|run| !run.hidden && run.end() > first);
                let spans = runs.filter_map(|run| match run.read(*layer)? {
                    Remembered::Attention { keys, values } => {
                        Some(Span { keys, values, position: run.position, visible: run.visible.clone() })
                    }
                    Remembered::States(_) => None,
                });
                spans.collect()
            }
            Keeping::ForThePass(held) => {
                let span = held.iter().cloned().map(|(keys, values)| Span {
                    keys: Stored::Float(keys),
                    values: Stored::Float(values),
                    position,
                    visible: None,
                });
                span.collect()
            }
        }
    }
}

fn fresh_states(layout: &Layout) -> States {
    let state = |layer: &LayerLayout| matches!(layer, LayerLayout::Recurrent).then(RecurrentState::default);
    layout.layers.iter().map(state).collect()
}
