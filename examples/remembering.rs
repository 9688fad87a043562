//! Facts, turns and branches: what a session remembers, and in how many ways it can go on.
//!
//! `cargo run --release --example remembering [MODEL]`

#![allow(clippy::print_stdout, reason = "an example prints its output")]

use firebox::internals::runtime::likeliest;
use firebox::{AfterEviction, Branches, Model, Role, WholeTurns, device};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).unwrap_or("tests/fixtures/reference/qwen3".into());
    let model = Model::open(path, &device("cpu")?)?;
    let policy = WholeTurns { after: AfterEviction::CompactPositions };
    let mut session = model.session()?.with_turn_capacity(64, policy);

    let address = session.add_fact(&[11, 12, 13])?;
    for turn in 0..8 {
        session.begin_turn(&[Role::User, Role::Assistant])?;
        session.feed(&[20 + turn; 12])?;
    }
    session.supersede(address, &[11, 14, 15])?;
    println!("of 8 turns of 12 tokens in 64, and a fact that has changed:");
    for turn in session.turns() {
        println!("  {:?} {:?}: {} tokens, {:?}", turn.id, turn.kind, turn.tokens, turn.hidden);
    }

    // Two ways to go on cost what follows, not what came before.
    let mut tree = Branches::new(session);
    let [left, right] = [tree.fork(tree.root())?, tree.fork(tree.root())?];
    for (branch, said) in [(left, 40), (right, 41)] {
        let logits = tree.session(branch)?.feed(&[said])?;
        println!("after {said}: {}", likeliest(&logits));
    }
    let kept = tree.promote(right)?;
    tree.drop_branch(left)?;
    println!("{} tokens remain on the branch that was kept", tree.session(kept)?.tokens().len());
    Ok(())
}
