//! `heads.json`: the heads of a model and the generation of each in use.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};

use crate::error::Fault;
use crate::excerpt::Excerpt;
use crate::manifest::{CREATED_BY, check_hash, parse_versioned};

/// The table's file name in the directory of heads.
pub(super) const TABLE: &str = "heads.json";

/// The most characters of a head's name.
const MAX_NAME_LEN: usize = 64;

const FORMAT: &str = "firebox-heads";
const VERSION: u32 = 1;

/// Returns whether a name is valid for a head: 1 to 64 of `a-z`, `0-9`, dot, dash and underscore, not beginning with dot or
/// dash, and not `heads.json`, which is the table's name.
pub fn is_head_name(name: &str) -> bool {
    (1..=MAX_NAME_LEN).contains(&name.len())
        && name.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'.' | b'-' | b'_'))
        && !name.starts_with(['.', '-'])
        && name != TABLE
}

/// The heads installed in a model. Replacing this file commits a change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeadTable {
    /// Always `firebox-heads`.
    pub format: String,
    /// The version of the format; readers refuse what they do not know.
    pub version: u32,
    /// The program that wrote it.
    pub created_by: String,
    /// The first layer that belongs to heads; absent if there are none.
    pub split: Option<usize>,
    /// The generation of the next installed head. Generations are never reused, across all heads.
    pub next_generation: u64,
    /// The heads, by name.
    pub heads: Vec<HeadRow>,
}

/// One head of a table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeadRow {
    /// The name.
    pub name: String,
    /// The generation in use.
    pub active: HeadGeneration,
    /// The generation to roll back to.
    pub previous: Option<HeadGeneration>,
}

/// One installation of a head.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeadGeneration {
    /// Its number.
    pub generation: u64,
    /// The hash of its `head.json`, which contains the hashes of its segments.
    pub hash: String,
}

impl HeadTable {
    /// The table of a model that has never had a head.
    pub(super) fn new() -> Self {
        Self {
            format: FORMAT.into(),
            version: VERSION,
            created_by: CREATED_BY.into(),
            split: None,
            next_generation: 1,
            heads: Vec::new(),
        }
    }

    /// Parses and checks a table.
    pub fn parse(json: &[u8]) -> Result<Self, Fault> {
        let table: Self =
            parse_versioned(json, (FORMAT, VERSION), "remove the folder of heads and install them again")?;
        table.check()?;
        Ok(table)
    }

    fn check(&self) -> Result<(), Fault> {
        if self.split.is_none() != self.heads.is_empty() {
            return Err(Fault::new("split", "it has to be there where there are heads, and only there"));
        }
        let mut generations = HashSet::new();
        let mut before: Option<&str> = None;
        for (at, row) in self.heads.iter().enumerate() {
            let field = |what: &str| format!("heads[{at}].{what}");
            if !is_head_name(&row.name) {
                return Err(Fault::new(
                    field("name"),
                    format!("{:?} cannot name a head", Excerpt(&row.name)),
                ));
            }
            if before.is_some_and(|before| before >= row.name.as_str()) {
                return Err(Fault::new(
                    field("name"),
                    format!("{} is listed twice or out of order", row.name),
                ));
            }
            before = Some(&row.name);
            for (what, generation) in [("active", Some(&row.active)), ("previous", row.previous.as_ref())] {
                let Some(HeadGeneration { generation, hash }) = generation else { continue };
                if *generation == 0 || *generation >= self.next_generation {
                    return Err(Fault::new(
                        field(&format!("{what}.generation")),
                        format!("{generation}, expected 1 to what is before {}", self.next_generation),
                    ));
                }
                if !generations.insert(generation) {
                    return Err(Fault::new(field(&format!("{what}.generation")), "listed twice"));
                }
                check_hash(&field(&format!("{what}.hash")), hash)?;
            }
        }
        Ok(())
    }

    pub(super) fn names(&self) -> Vec<String> {
        self.heads.iter().map(|row| row.name.clone()).collect()
    }

    pub(super) fn row(&self, name: &str) -> Option<&HeadRow> {
        self.heads.iter().find(|row| row.name == name)
    }

    /// Inserts a head in sorted order and replaces one of the same name.
    pub(super) fn put(&mut self, row: HeadRow) {
        match self.heads.binary_search_by(|known| known.name.cmp(&row.name)) {
            Ok(at) => self.heads[at] = row,
            Err(at) => self.heads.insert(at, row),
        }
    }

    pub(super) fn take(&mut self, name: &str) {
        self.heads.retain(|row| row.name != name);
        if self.heads.is_empty() {
            self.split = None;
        }
    }
}

impl HeadRow {
    pub(super) fn generations(&self) -> impl Iterator<Item = &HeadGeneration> {
        [Some(&self.active), self.previous.as_ref()].into_iter().flatten()
    }
}
