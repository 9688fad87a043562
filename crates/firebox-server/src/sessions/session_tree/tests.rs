//! Tests of a session with branches.

use firebox_engine::EngineConfig;
use firebox_runtime::relevance::{Calibration, LabelledPair};
use firebox_runtime::schedule::Priority;
use firebox_runtime::telemetry::Telemetry;
use firebox_runtime::{Model, device};

use super::*;

fn tree() -> SessionTree {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/pocket");
    let model = Model::open(path, &device("cpu").unwrap()).unwrap();
    let (session, engine) = (model.session().unwrap(), Engine::start(EngineConfig::default()).unwrap());
    let served = ServedModel::new("pocket", model, Priority::default(), &engine, &Telemetry::default());
    let capacity = Capacity::new(1024, None, None);
    SessionTree::from_session(Arc::new(served.unwrap()), session, capacity, Transcript::default())
}

/// A scorer to which all turns are relevant.
fn scorer(served: &ServedModel) -> Similarity<OwnStates> {
    let said = |tokens| TurnContent { text: "", tokens };
    let [a, b] = ["My brother is called Tom.", "Two and two is four."]
        .map(|text| served.tokenizer().unwrap().encode_literal(text, false).unwrap());
    let pairs = [(&a, &a, true), (&b, &b, true), (&a, &b, false), (&b, &a, false)].map(
        |(newest, earlier, related)| LabelledPair { newest: said(newest), earlier: said(earlier), related },
    );
    let states = OwnStates::new(served.model.decoder().unwrap()).with_layers(0);
    let all = Calibration { threshold: -2.0, slope: 1.0, accuracy: 1.0 };
    Similarity::fit(states, &pairs).unwrap().with_calibration(all)
}

/// Asks a question and stores it without an answer.
fn ask(tree: &mut SessionTree, text: &str) -> u64 {
    let PreparedQuestion { mut session, prompt, asked, .. } = tree.ask(text).unwrap();
    session.feed(&prompt).unwrap();
    *tree.tree.session(asked.branch).unwrap() = session;
    tree.add_entry(asked.turn, Kind::Turn, text, prompt.len()).unwrap();
    asked.turn.0
}

#[test]
fn turns_hidden_by_the_client_stay_hidden() {
    let mut tree = tree();
    tree.scorer = Some(scorer(&tree.served));
    let text = "My brother is called Tom.";
    let turn = ask(&mut tree, text);
    let is_hidden = |tree: &mut SessionTree| {
        let session = tree.tree.session(tree.active).unwrap();
        session.all_turns().find(|held| held.id.0 == turn).unwrap().hidden.is_some()
    };
    ask(&mut tree, text);
    assert!(!is_hidden(&mut tree));
    tree.mark(turn, None, Some(true)).unwrap();
    ask(&mut tree, text);
    assert!(is_hidden(&mut tree));
    tree.fork(None).unwrap();
    ask(&mut tree, text);
    assert!(is_hidden(&mut tree), "in a branch as well");
    tree.mark(turn, None, Some(false)).unwrap();
    ask(&mut tree, text);
    assert!(!is_hidden(&mut tree));
}

/// Closing an answer fails if no page is free at its end.
#[test]
fn an_open_answer_is_closed_before_any_change() {
    let mut tree = tree();
    let turn = ask(&mut tree, "My brother is called Tom.");
    type Change = fn(&mut SessionTree, u64);
    let changes: [Change; 5] = [
        |tree, _| drop(tree.set_head(None).unwrap()),
        |tree, turn| tree.mark(turn, None, Some(true)).unwrap(),
        |tree, turn| tree.mark(turn, Some(true), None).unwrap(),
        |tree, _| assert!(tree.add_fact("The user's dog is called Rex.").is_ok()),
        |tree, _| assert!(tree.fork(None).is_ok()),
    ];
    for (at, change) in changes.into_iter().enumerate() {
        tree.transcript().open = true;
        change(&mut tree, turn);
        assert!(!tree.transcript().open, "change {at}");
    }
}
