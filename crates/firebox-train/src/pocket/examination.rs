//! Evaluation of a pocket model on its tasks.

use std::collections::BTreeMap;

use firebox_cache::{KvType, Role as TurnRole};
use firebox_runtime::{
    AfterEviction, Model, OWN_HEAD, Session, SlidingWindow, TurnKind, WholeTurns, likeliest,
};
use serde::Serialize;

use super::{Answer, EvaluationPlan, FALLBACK, Generator, Kind, Passage, Persistent, ROUTER, Scribe, Task};
use crate::error::TrainError;

/// No exchange has fewer tokens.
const SHORTEST: usize = 8;

/// A count of right answers out of all.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Score {
    /// Answers that are right to the last piece.
    pub right: usize,
    /// All that were asked for.
    pub asked: usize,
}

impl Score {
    /// The share that is right.
    pub fn share(self) -> f64 {
        self.right as f64 / (self.asked as f64).max(1.0)
    }

    fn add(&mut self, right: bool) {
        self.right += usize::from(right);
        self.asked += 1;
    }
}

/// The results of a head on a task.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Cell {
    /// The head.
    pub head: String,
    /// The task.
    pub task: Task,
    /// All answers.
    pub score: Score,
    /// By what they are about.
    pub kinds: BTreeMap<Kind, Score>,
    /// The mean negative logarithm of the probability of the answers' pieces.
    pub surprise: f64,
}

/// The results of an examination.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// Heads by tasks.
    pub cells: Vec<Cell>,
    /// The router's score at choosing the head that a request is for.
    pub router: Option<Score>,
    /// By the head that it is for.
    pub routes: BTreeMap<Task, Score>,
    /// Perplexity of the model's own layers over everything that is said.
    pub perplexity: f64,
}

/// The inputs of an examination.
#[derive(Debug, Clone)]
pub struct Examination<'a> {
    /// The model, with its heads.
    pub model: &'a Model,
    /// The conversations to ask.
    pub plan: &'a EvaluationPlan,
    /// The number format of keys and values.
    pub kept: KvType,
}

impl Examination<'_> {
    /// Asks every head for everything, each answer after the right answers to what was asked before.
    pub fn hold(&self, on_head: &mut dyn FnMut(&str)) -> Result<Report, TrainError> {
        let scribe = self.scribe()?;
        let passages = self.passages(&scribe)?;
        let installed = self.model.heads().map(|heads| heads.names()).unwrap_or_default();
        let mut heads = vec![OWN_HEAD.to_owned()];
        heads.extend(
            Task::ALL.map(|task| task.name().to_owned()).into_iter().filter(|n| installed.contains(n)),
        );
        heads.extend(installed.iter().filter(|name| *name == FALLBACK).cloned());
        let mut report =
            Report { cells: Vec::new(), router: None, routes: BTreeMap::new(), perplexity: f64::NAN };
        let mut said = (0.0, 0);
        for head in heads {
            on_head(&head);
            for task in Task::ALL {
                let mut cell = Cell {
                    head: head.clone(),
                    task,
                    score: Score::default(),
                    kinds: BTreeMap::new(),
                    surprise: 0.0,
                };
                let mut pieces = 0;
                for passage in passages.iter().filter(|passage| passage.task == task) {
                    let rows = Rows::of(&mut self.with_head(&head)?, &passage.tokens)?;
                    if head == OWN_HEAD {
                        said.0 += rows.surprise(1..passage.tokens.len());
                        said.1 += passage.tokens.len() - 1;
                    }
                    for Answer { kind, tokens } in &passage.answers {
                        let right = rows.agree(tokens.clone());
                        cell.score.add(right);
                        cell.kinds.entry(*kind).or_default().add(right);
                        cell.surprise += rows.surprise(tokens.clone());
                        pieces += tokens.len();
                    }
                }
                cell.surprise /= (pieces as f64).max(1.0);
                report.cells.push(cell);
            }
        }
        report.perplexity = (said.0 / (said.1 as f64).max(1.0)).exp();
        if installed.iter().any(|name| name == ROUTER) {
            on_head(ROUTER);
            self.route(&passages, &mut report)?;
        }
        Ok(report)
    }

    fn route(&self, passages: &[Passage], report: &mut Report) -> Result<(), TrainError> {
        let mut all = Score::default();
        for passage in passages {
            let rows = Rows::of(&mut self.with_head(ROUTER)?, &passage.tokens)?;
            for Answer { kind, tokens } in &passage.answers {
                let wanted = kind.route(passage.task);
                let found = Task::ALL.get(rows.found[tokens.start - 1] as usize);
                all.add(found == Some(&wanted));
                report.routes.entry(wanted).or_default().add(found == Some(&wanted));
            }
        }
        report.router = Some(all);
        Ok(())
    }

    /// Scores how many facts of the system text `head` still answers after `turns` turns were forgotten, over so many
    /// `conversations`. Turns hold `capacity` tokens. The facts are kept apart from the turns or, if `naive`, are the first turn
    /// of a sliding window.
    pub fn persistence(
        &self,
        head: &str,
        conversations: usize,
        turns: usize,
        capacity: usize,
        naive: bool,
    ) -> Result<Score, TrainError> {
        let scribe = self.scribe()?;
        let mut generator = Generator::new(self.plan.seed, self.plan.split, self.plan.shape.shape());
        let mut score = Score::default();
        for _ in 0..conversations {
            let Persistent { system, exchanges, questions } =
                generator.persistent(turns + capacity / SHORTEST);
            let session = self.with_head(head)?;
            let told = scribe.line(&system)?;
            let mut session = if naive {
                let mut session = session.with_turn_capacity(capacity, SlidingWindow);
                session.begin_turn(&[TurnRole::System]).map_err(TrainError::network)?;
                session.feed(&told).map_err(TrainError::network)?;
                session
            } else {
                let policy = WholeTurns { after: AfterEviction::CompactPositions };
                let mut session = session.with_turn_capacity(capacity, policy);
                session.add_fact(&told).map_err(TrainError::network)?;
                session
            };
            let (mut fed, mut evicted) = (0, 0);
            for [said, answered] in &exchanges {
                if evicted >= turns {
                    break;
                }
                session.begin_turn(&[TurnRole::User, TurnRole::Assistant]).map_err(TrainError::network)?;
                let tokens = [scribe.line(said)?, scribe.line(answered)?].concat();
                session.feed(&tokens).map_err(TrainError::network)?;
                fed += 1;
                let held = session.turns().filter(|turn| turn.kind == TurnKind::Turn).count();
                evicted = (fed + usize::from(naive)).saturating_sub(held);
            }
            if evicted < turns {
                let reason = format!("only {evicted} turns were forgotten; lower the capacity");
                return Err(TrainError::NoData { what: "an examination".into(), reason });
            }
            for [asked, answer] in &questions {
                let mut branch = session.clone();
                branch.begin_turn(&[TurnRole::User, TurnRole::Assistant]).map_err(TrainError::network)?;
                let (asked, answer) = (scribe.line(asked)?, scribe.line(answer)?);
                let begin = asked.len() + 1;
                let tokens = [asked, answer].concat();
                let rows = Rows::of(&mut branch, &tokens)?;
                score.add(rows.agree(begin..tokens.len()));
            }
        }
        Ok(score)
    }

    fn scribe(&self) -> Result<Scribe, TrainError> {
        Scribe::new(self.model.tokenizer().map_err(TrainError::network)?)
    }

    fn passages(&self, scribe: &Scribe) -> Result<Vec<Passage>, TrainError> {
        let EvaluationPlan { split, shape, seed, conversations_per_task } = *self.plan;
        let mut passages = Vec::new();
        for task in Task::ALL {
            let mut generator = Generator::new(seed, split, shape.shape());
            for _ in 0..conversations_per_task {
                passages.push(scribe.write(&generator.conversation(task))?);
            }
        }
        Ok(passages)
    }

    /// Begins a session with a head selected; fails if the session would fall back to another head.
    fn with_head(&self, head: &str) -> Result<Session, TrainError> {
        let mut session = self.model.session().map_err(TrainError::network)?.with_kv_type(self.kept);
        match session.use_head(head).fallback_reason {
            Some(reason) => Err(TrainError::network(reason.to_string())),
            None => Ok(session),
        }
    }
}

/// The predictions of a model for a known text.
struct Rows {
    /// The likeliest piece after every one.
    found: Vec<u32>,
    /// The negative logarithm of the probability of the piece that does come.
    surprises: Vec<f64>,
    tokens: Vec<u32>,
}

impl Rows {
    fn of(session: &mut Session, tokens: &[u32]) -> Result<Self, TrainError> {
        let mut logits = Vec::new();
        session.feed_each_row(tokens, |rows| logits.extend_from_slice(rows)).map_err(TrainError::network)?;
        let width = logits.len() / tokens.len();
        let mut rows = Self { found: Vec::new(), surprises: Vec::new(), tokens: tokens.to_vec() };
        for (at, row) in logits.chunks_exact(width).enumerate() {
            rows.found.push(likeliest(row));
            let Some(score) = tokens.get(at + 1).and_then(|&next| row.get(next as usize)) else { continue };
            let highest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let total: f64 = row.iter().map(|logit| f64::from(logit - highest).exp()).sum();
            rows.surprises.push(total.ln() - f64::from(score - highest));
        }
        Ok(rows)
    }

    /// Returns whether the model would have said these pieces.
    fn agree(&self, mut pieces: std::ops::Range<usize>) -> bool {
        pieces.all(|at| self.found[at - 1] == self.tokens[at])
    }

    fn surprise(&self, pieces: std::ops::Range<usize>) -> f64 {
        pieces.map(|at| self.surprises[at - 1]).sum()
    }
}

impl Report {
    /// Returns the score of a head on a task.
    pub fn score(&self, head: &str, task: Task) -> Option<Score> {
        let cell = self.cells.iter().find(|cell| cell.head == head && cell.task == task)?;
        Some(cell.score)
    }
}
