//! Compiled grammars, shared by the requests that ask for the same one.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use firebox_grammar::{Constraint, Grammar, GrammarError};
use firebox_text::Tokenizer;

use crate::telemetry::Counter;
use crate::{Account, Budget, Charge, Model, RuntimeError};

/// Limits of a [`GrammarCache`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GrammarCacheConfig {
    /// The most grammars. An application has a few, and a lookup compares all.
    pub most_grammars: usize,
    /// The most bytes that grammars take together; one that takes more is not kept.
    pub most_bytes: u64,
    /// The most grammars that are compiled at once. Compiling takes a core, which answers that are under way lack.
    pub most_compiling: usize,
}

impl Default for GrammarCacheConfig {
    fn default() -> Self {
        Self { most_grammars: 32, most_bytes: 16 << 20, most_compiling: 1 }
    }
}

/// Bytes that are charged for a grammar before it is compiled: so many, and so many for every byte of its text.
const LEAST_BYTES: u64 = 256 << 10;
const BYTES_PER_SOURCE_BYTE: u64 = 32;

/// A grammar that is compiled for a model. Clones share it.
#[derive(Debug, Clone)]
pub struct CompiledGrammar(Arc<Compiled>);

#[derive(Debug)]
struct Compiled {
    /// The beginning of every text.
    beginning: Mutex<Constraint>,
    bytes: u64,
    budget: Option<Budget>,
    _charge: Option<Charge>,
}

/// The grammar of one request. Clones follow the texts of its choices, and share the states that these texts need.
#[derive(Debug, Clone)]
pub struct RequestGrammar {
    pub(crate) constraint: Constraint,
    pub(crate) charge: Option<Arc<Charge>>,
}

impl CompiledGrammar {
    fn new(grammar: &Grammar, model: &Model, ends: &[u32]) -> Result<Self, RuntimeError> {
        let tokenizer = model.tokenizer().map_err(|_| GrammarError::NoTokenizer)?;
        let budget = model.residency().map(|residency| residency.budget().clone());
        let expected = LEAST_BYTES + BYTES_PER_SOURCE_BYTE * grammar.source_bytes() as u64;
        let mut charge = charge(budget.as_ref(), expected)?;
        model.meters().add(Counter::CompiledGrammars, 1);
        let beginning = Constraint::new(grammar, tokenizer, ends)?;
        let bytes = beginning.bytes();
        if let Some(charge) = &mut charge {
            charge.resize(bytes)?;
        }
        Ok(Self(Arc::new(Compiled { beginning: Mutex::new(beginning), bytes, budget, _charge: charge })))
    }

    /// Begins the texts of a request. What these make the grammar's lexer build counts towards no other request's limit, and
    /// is charged like the grammar itself.
    pub fn begin(&self) -> Result<RequestGrammar, RuntimeError> {
        let charge = charge(self.0.budget.as_ref(), self.0.bytes)?.map(Arc::new);
        let beginning = self.0.beginning.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(RequestGrammar { constraint: beginning.separate(), charge })
    }

    /// Estimates the memory that it takes.
    pub fn bytes(&self) -> u64 {
        self.0.bytes
    }
}

fn charge(budget: Option<&Budget>, bytes: u64) -> Result<Option<Charge>, RuntimeError> {
    Ok(budget.map(|budget| budget.insist(Account::Scratch, bytes)).transpose()?)
}

/// Grammars that were compiled lately, by their content.
#[derive(Debug, Default)]
pub struct GrammarCache {
    config: GrammarCacheConfig,
    /// The most recently used last.
    entries: Mutex<Vec<Entry>>,
    compiling: AtomicUsize,
}

#[derive(Debug)]
struct Entry {
    grammar: Grammar,
    tokenizer: Weak<Tokenizer>,
    ends: Vec<u32>,
    budget: Option<Budget>,
    compiled: CompiledGrammar,
}

impl Entry {
    fn is_for(&self, grammar: &Grammar, model: &Model, ends: &[u32]) -> bool {
        let has_tokenizer =
            model.tokenizer().is_ok_and(|tokenizer| std::ptr::eq(self.tokenizer.as_ptr(), &**tokenizer));
        let has_budget = self.budget.is_some() == model.residency().is_some();
        has_tokenizer && has_budget && self.ends == ends && self.grammar == *grammar
    }

    fn bytes(&self) -> u64 {
        self.compiled.bytes() + self.grammar.source_bytes() as u64
    }
}

/// The permission to compile a grammar, one of a bounded number.
#[derive(Debug)]
pub struct CompilePermit(Arc<GrammarCache>);

impl Drop for CompilePermit {
    fn drop(&mut self) {
        self.0.compiling.fetch_sub(1, Ordering::Release);
    }
}

impl GrammarCache {
    /// Creates an empty cache.
    pub fn new(config: GrammarCacheConfig) -> Self {
        Self { config, ..Self::default() }
    }

    /// Returns its limits.
    pub fn config(&self) -> &GrammarCacheConfig {
        &self.config
    }

    /// Returns a grammar for texts of a model that any of `ends` may end, if it was compiled lately.
    pub fn get(&self, grammar: &Grammar, model: &Model, ends: &[u32]) -> Option<CompiledGrammar> {
        let mut entries = self.entries();
        let at = entries.iter().position(|entry| entry.is_for(grammar, model, ends))?;
        let entry = entries.remove(at);
        let compiled = entry.compiled.clone();
        entries.push(entry);
        Some(compiled)
    }

    /// Returns a grammar that was compiled lately, or compiles it, which may take seconds.
    pub fn compile(
        &self,
        grammar: &Grammar,
        model: &Model,
        ends: &[u32],
    ) -> Result<CompiledGrammar, RuntimeError> {
        if let Some(compiled) = self.get(grammar, model, ends) {
            return Ok(compiled);
        }
        let compiled = CompiledGrammar::new(grammar, model, ends).or_else(|error| match error {
            // Cached grammars make room for the requested one.
            RuntimeError::Memory(_) if !std::mem::take(&mut *self.entries()).is_empty() => {
                CompiledGrammar::new(grammar, model, ends)
            }
            error => Err(error),
        })?;
        let tokenizer = model.tokenizer().map(Arc::downgrade).unwrap_or_default();
        let mut entries = self.entries();
        entries.push(Entry {
            grammar: grammar.clone(),
            tokenizer,
            ends: ends.to_vec(),
            budget: compiled.0.budget.clone(),
            compiled: compiled.clone(),
        });
        entries.retain(|entry| entry.tokenizer.strong_count() > 0);
        let GrammarCacheConfig { most_grammars, most_bytes, .. } = self.config;
        while entries.len() > most_grammars || entries.iter().map(Entry::bytes).sum::<u64>() > most_bytes {
            entries.remove(0);
        }
        Ok(compiled)
    }

    /// Removes the grammars of a model that is no longer served.
    pub fn forget(&self, model: &Model) {
        let Ok(tokenizer) = model.tokenizer() else { return };
        self.entries().retain(|entry| !std::ptr::eq(entry.tokenizer.as_ptr(), &**tokenizer));
    }

    /// Returns the permission to compile a grammar, unless as many are compiled as may be.
    pub fn try_permit(self: &Arc<Self>) -> Option<CompilePermit> {
        let most = self.config.most_compiling.max(1);
        let more = |compiling: usize| (compiling < most).then_some(compiling + 1);
        let taken = self.compiling.fetch_update(Ordering::Acquire, Ordering::Relaxed, more);
        taken.is_ok().then(|| CompilePermit(self.clone()))
    }

    fn entries(&self) -> MutexGuard<'_, Vec<Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::device;
    use crate::residency::ResidencyOptions;
    use crate::telemetry::Telemetry;

    fn model() -> Model {
        let path = "../../tests/fixtures/gguf/llama/model.gguf";
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
        Model::open(path, &device("cpu").unwrap()).unwrap().with_telemetry(&Telemetry::default(), "m")
    }

    fn words(least: usize) -> Grammar {
        Grammar::Regex(format!("[a-z]{{{least},9}}"))
    }

    #[test]
    fn a_grammar_is_compiled_once_while_it_is_kept() {
        let model = model();
        let config = GrammarCacheConfig { most_grammars: 2, ..GrammarCacheConfig::default() };
        let cache = GrammarCache::new(config);
        let compiled = |least| {
            cache.compile(&words(least), &model, &[]).unwrap().begin().unwrap();
            model.meters().count(Counter::CompiledGrammars)
        };
        assert_eq!([1, 1, 2, 1, 3].map(compiled), [1, 1, 2, 2, 3]);
        assert_eq!(compiled(1), 3, "the one that was used last is kept");
        assert_eq!(compiled(2), 4);
        cache.compile(&words(2), &model, &[5]).unwrap();
        assert_eq!(model.meters().count(Counter::CompiledGrammars), 5, "other tokens end the text");
        cache.forget(&model);
        assert!(cache.get(&words(2), &model, &[5]).is_none());
    }

    #[test]
    fn one_that_is_too_large_is_not_kept() {
        let model = model();
        let cache = GrammarCache::new(GrammarCacheConfig { most_bytes: 1, ..GrammarCacheConfig::default() });
        assert!(cache.compile(&words(1), &model, &[]).unwrap().bytes() > 1);
        assert!(cache.get(&words(1), &model, &[]).is_none());
    }

    #[test]
    fn grammars_are_charged_while_they_exist() {
        let path = "../../tests/fixtures/gguf/llama/model.gguf";
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
        let options = ResidencyOptions::new(64 << 30);
        let model = Model::open_within(path, &device("cpu").unwrap(), &options).unwrap();
        let budget = model.residency().unwrap().budget().clone();
        let before = budget.held(Account::Scratch);
        let cache = GrammarCache::default();
        let compiled = cache.compile(&words(1), &model, &[]).unwrap();
        let held = |times: u64| assert_eq!(budget.held(Account::Scratch), before + times * compiled.bytes());
        held(1);
        let request = compiled.begin().unwrap();
        let choice = request.clone();
        held(2);
        drop(request);
        held(2);
        drop(choice);
        held(1);
        // What is kept makes room for a grammar that is asked for; without room that is refused.
        let rest = budget.charge(Account::Weights, budget.left()).unwrap();
        let large = Grammar::Regex(format!("({})", "a|".repeat(20_000)));
        assert!(matches!(cache.compile(&large, &model, &[]), Err(RuntimeError::Memory(_))));
        assert!(cache.get(&words(1), &model, &[]).is_none());
        drop(rest);
    }

    #[test]
    fn a_bounded_number_is_compiled_at_once() {
        let cache = Arc::new(GrammarCache::default());
        let permits: Vec<_> = std::iter::from_fn(|| cache.try_permit()).collect();
        assert_eq!(permits.len(), cache.config().most_compiling);
        drop(permits);
        assert!(cache.try_permit().is_some());
    }
}
