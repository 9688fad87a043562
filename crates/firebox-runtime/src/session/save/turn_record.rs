//! The form of turns in a session file.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use firebox_cache::{HiddenReason, Role, Turn, TurnId, TurnKind};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TurnRecord {
    id: u64,
    #[serde(with = "KindDef")]
    kind: TurnKind,
    tokens: usize,
    roles: Vec<RoleRecord>,
    /// Since 1970, in seconds and nanoseconds.
    began: (u64, u32),
    /// The bits of an `f32`, which keep NaN and every digit.
    relevance: u32,
    pinned: bool,
    hidden: Option<HiddenRecord>,
}

#[derive(Serialize, Deserialize)]
struct RoleRecord(#[serde(with = "RoleDef")] Role);

#[derive(Serialize, Deserialize)]
struct HiddenRecord(#[serde(with = "HiddenDef")] HiddenReason);

#[derive(Serialize, Deserialize)]
#[serde(remote = "Role", rename_all = "snake_case")]
enum RoleDef {
    System,
    User,
    Assistant,
    Tool,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "TurnKind", rename_all = "snake_case")]
enum KindDef {
    Turn,
    Fact,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "HiddenReason", rename_all = "snake_case")]
enum HiddenDef {
    Irrelevant,
    Superseded,
}

impl From<&Turn> for TurnRecord {
    fn from(turn: &Turn) -> Self {
        let began = turn.began.duration_since(UNIX_EPOCH).unwrap_or_default();
        Self {
            id: turn.id.0,
            kind: turn.kind,
            tokens: turn.tokens,
            roles: turn.roles.iter().copied().map(RoleRecord).collect(),
            began: (began.as_secs(), began.subsec_nanos()),
            relevance: turn.relevance.to_bits(),
            pinned: turn.pinned,
            hidden: turn.hidden.map(HiddenRecord),
        }
    }
}

impl From<TurnRecord> for Turn {
    fn from(record: TurnRecord) -> Self {
        let (seconds, nanos) = record.began;
        let began = Duration::from_secs(seconds).saturating_add(Duration::from_nanos(nanos.into()));
        Self {
            id: TurnId(record.id),
            kind: record.kind,
            tokens: record.tokens,
            roles: record.roles.into_iter().map(|RoleRecord(role)| role).collect(),
            // The file may hold a time that the system cannot represent.
            began: UNIX_EPOCH.checked_add(began).unwrap_or(SystemTime::UNIX_EPOCH),
            relevance: f32::from_bits(record.relevance),
            pinned: record.pinned,
            hidden: record.hidden.map(|HiddenRecord(hidden)| hidden),
        }
    }
}
