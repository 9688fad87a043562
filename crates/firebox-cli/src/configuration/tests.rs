//! Tests of the configuration file and of the order of precedence between flags, environment and file.

use firebox_server::KeyShare;
use std::collections::BTreeMap;
use std::process::Command as Process;

use clap::CommandFactory as _;
use serde_json::{Value, json};

use super::*;
use crate::args::Cli;

/// Commands whose settings are tried; together they have all that there are.
const COMMANDS: [&[&str]; 4] = [&["run"], &["chat"], &["bench", "model"], &["serve", "model"]];

/// Values of which each setting takes at least two.
const CANDIDATES: [&str; 13] =
    ["1", "2", "3", "0.5", "1G", "2G", "3G", "direct", "buffered", "auto", "always", "never", "one"];

fn file(text: &str) -> anyhow::Result<Configuration> {
    read(&Cli::command(), Path::new("firebox.toml"), text)
}

fn refused(text: &str) -> String {
    file(text).unwrap_err().to_string()
}

fn settings(command: &str) -> Vec<Arg> {
    let cli = Cli::command();
    let own = cli.find_subcommand(command).unwrap().get_arguments();
    own.chain(cli.get_arguments()).filter(|arg| key_of(arg).is_some()).cloned().collect()
}

/// Values that a setting takes, neighbours unlike each other.
fn values(command: &str, arg: &Arg) -> [String; 3] {
    let takes = |text: &str| {
        let args =
            ["firebox".to_owned(), command.to_owned(), format!("--{}={text}", arg.get_long().unwrap())];
        let given: Vec<String> =
            args.into_iter().chain((command != "run").then(|| "model".to_owned())).collect();
        Cli::command().try_get_matches_from(given).is_ok()
    };
    let known: Vec<String> =
        arg.get_possible_values().iter().map(|value| value.get_name().to_owned()).collect();
    let known = if known.is_empty() { CANDIDATES.map(str::to_owned).to_vec() } else { known };
    let taken: Vec<String> = known.into_iter().filter(|text| takes(text)).collect();
    assert!(taken.len() >= 2, "{} takes only {taken:?}", arg.get_id());
    [taken[0].clone(), taken[1].clone(), taken.get(2).unwrap_or(&taken[0]).clone()]
}

#[test]
fn a_variable_is_called_as_its_flag_is() {
    for command in COMMANDS.map(|command| command[0]) {
        for arg in settings(command) {
            let flag = arg.get_long().unwrap().to_uppercase().replace('-', "_");
            assert_eq!(arg.get_env().unwrap().to_str().unwrap(), format!("FIREBOX_{flag}"), "{command}");
        }
    }
}

#[test]
fn every_setting_is_one_of_the_commands_that_are_tried() {
    fn all(command: &Command, found: &mut BTreeSet<String>) {
        found.extend(command.get_arguments().filter_map(key_of));
        command.get_subcommands().for_each(|command| all(command, found));
    }
    let mut every = BTreeSet::new();
    all(&Cli::command(), &mut every);
    let tried: BTreeSet<String> =
        COMMANDS.iter().flat_map(|command| settings(command[0])).filter_map(|arg| key_of(&arg)).collect();
    assert_eq!(every, tried);
    assert!(every.len() > 20, "{every:?}");
}

/// Every setting of every command, given by every subset of flag, environment, the command's own table and the common
/// one. A process for each, because what is in the environment is read once for all.
#[test]
fn a_flag_outranks_the_environment_which_outranks_the_file() {
    let folder = tempfile::tempdir().unwrap();
    for command in COMMANDS {
        let args = settings(command[0]);
        let values: Vec<[String; 3]> = args.iter().map(|arg| values(command[0], arg)).collect();
        for round in 0..8 {
            let gives = |index: usize, source: u32| (index * 3 + round) >> source & 1 == 1;
            let mut text = String::new();
            let mut process = Process::new(std::env::current_exe().unwrap());
            let mut line: Vec<String> =
                ["firebox"].iter().chain(command).map(|word| word.to_string()).collect();
            let mut expected = BTreeMap::new();
            let is_serve = command[0] == "serve";
            let table = |key: &str| if is_serve && !is_common(key) { "serve" } else { "defaults" };
            for at in ["defaults", "serve"] {
                text += &format!("[{at}]\n");
                for (index, (arg, values)) in args.iter().zip(&values).enumerate() {
                    let key = key_of(arg).unwrap();
                    if gives(index, 0) && table(&key) == at {
                        text += &format!("{} = {:?}\n", key.replace('-', "_"), values[0]);
                    }
                }
            }
            for (index, (arg, values)) in args.iter().zip(&values).enumerate() {
                let variable = arg.get_env().unwrap();
                process.env_remove(variable);
                let key = key_of(arg).unwrap();
                let mut winner = gives(index, 0).then_some(0);
                if gives(index, 1) {
                    process.env(variable, &values[1]);
                    winner = Some(1);
                }
                if gives(index, 2) {
                    line.push(format!("--{key}={}", values[2]));
                    winner = Some(2);
                }
                if let Some(winner) = winner {
                    expected.insert(arg.get_id().to_string(), json!([values[winner].clone()]));
                }
            }
            let path = folder.path().join("firebox.toml");
            std::fs::write(&path, &text).unwrap();
            line.push(format!("--config={}", path.display()));
            process.env("FIREBOX_TEST_LINE", serde_json::to_string(&line).unwrap());
            process.env_remove("FIREBOX_CONFIG");
            let output = process
                .args([
                    "configuration::tests::tells_what_a_line_comes_to",
                    "--exact",
                    "--ignored",
                    "--nocapture",
                ])
                .output()
                .unwrap();
            let stdout = String::from_utf8(output.stdout).unwrap();
            let told = stdout.lines().find_map(|line| line.split("TOLD ").nth(1)).unwrap_or_else(|| {
                panic!("{stdout}\n{}\nfor {line:?}\n{text}", String::from_utf8_lossy(&output.stderr))
            });
            let told: BTreeMap<String, Value> = serde_json::from_str(told).unwrap();
            for (id, value) in expected {
                assert_eq!(told.get(&id), Some(&value), "{id} of {line:?}\n{text}");
            }
        }
    }
}

/// Returns whether other commands than the server have a setting.
fn is_common(key: &str) -> bool {
    ["run", "chat", "bench"]
        .iter()
        .any(|command| settings(command).iter().any(|arg| key_of(arg).as_deref() == Some(key)))
}

/// The other half of the test above, in a process of its own.
#[test]
#[ignore = "helper: of tests of other arguments"]
#[allow(clippy::print_stdout)]
fn tells_what_a_line_comes_to() {
    let line: Vec<OsString> =
        serde_json::from_str::<Vec<String>>(&std::env::var("FIREBOX_TEST_LINE").unwrap())
            .unwrap()
            .into_iter()
            .map(OsString::from)
            .collect();
    let configuration = Configuration::of(&Cli::command(), &line).unwrap();
    let matches = configuration.over(Cli::command()).try_get_matches_from(line).unwrap();
    let (command, matches) = matches.subcommand().unwrap();
    let raw = |id: &str| -> Vec<String> {
        let values = matches.get_raw(id).into_iter().flatten();
        values.map(|value| value.to_str().unwrap().to_owned()).collect()
    };
    let told: BTreeMap<String, Vec<String>> =
        settings(command).iter().map(|arg| (arg.get_id().to_string(), raw(arg.get_id().as_str()))).collect();
    println!("\nTOLD {}", serde_json::to_string(&told).unwrap());
}

#[test]
fn the_servers_table_outranks_the_common_one() {
    let found = file("[defaults]\nmemory = \"1G\"\n[serve]\nmemory = \"2G\"\nport = 9000\n").unwrap();
    let matches = found.over(Cli::command()).try_get_matches_from(["firebox", "serve", "model"]).unwrap();
    let serve = matches.subcommand().unwrap().1;
    assert_eq!(serve.get_one::<u64>("memory"), Some(&(2 << 30)));
    let matches = found.over(Cli::command()).try_get_matches_from(["firebox", "run"]).unwrap();
    assert_eq!(matches.subcommand().unwrap().1.get_one::<u64>("memory"), Some(&(1 << 30)));
}

#[test]
fn several_keys_are_a_list() {
    let found = file("[serve]\napi_key = [\"one\", \"two\"]\n").unwrap();
    let matches = found.over(Cli::command()).try_get_matches_from(["firebox", "serve", "m"]).unwrap();
    let keys: Vec<&String> = matches.subcommand().unwrap().1.get_many("api_key").unwrap().collect();
    assert_eq!(keys, ["one", "two"]);
    let given = ["firebox", "serve", "m", "--api-key", "three"];
    let matches = found.over(Cli::command()).try_get_matches_from(given).unwrap();
    let keys: Vec<&String> = matches.subcommand().unwrap().1.get_many("api_key").unwrap().collect();
    assert_eq!(keys, ["three"]);
    let help = found.over(Cli::command()).try_get_matches_from(["firebox", "serve", "--help"]).unwrap_err();
    assert!(!help.to_string().contains("[default: one"), "a key shows in the help");
}

#[test]
fn what_is_wrong_is_said_with_its_line_and_what_was_meant() {
    for (text, words) in [
        ("[defaults]\n\ntempp = 1\n", &["firebox.toml, line 3", "tempp", "did you mean temp?"][..]),
        ("[defaults]\ntop_kk = 1\n", &["line 2", "did you mean top-k?"]),
        ("[server]\n", &["line 1", "[server]", "did you mean serve?"]),
        ("temp = 1\n", &["line 1", "below [defaults]"]),
        ("[defaults]\nport = 1\n", &["line 2", "below [serve]"]),
        ("[serve]\ntemp = 1\n", &["line 2", "below [defaults]"]),
        ("[defaults]\ntemp = \"hot\"\n", &["line 2", "hot", "--temp"]),
        ("[defaults]\nthreads = 0\n", &["line 2", "0", "1..=512"]),
        ("[defaults]\nmode = \"fast\"\n", &["line 2", "fast", "throughput"]),
        ("[defaults]\ntemp = 1979-05-27\n", &["line 2", "a text or a number"]),
        ("[defaults]\ntemp = [1]\n", &["line 2", "a text or a number"]),
        ("[defaults]\ntop-k = 1\ntop_k = 2\n", &["line 3", "twice"]),
        ("[defaults]\ntemp = \n", &["line 2"]),
        ("[model]\npath = \"a\"\n", &["line 1", "[[model]]"]),
        ("[[model]]\nname = \"a\"\n", &["line 1", "path"]),
        ("[[model]]\npath = \"a\"\nmemroy = 1\n", &["line 3", "did you mean memory?"]),
        ("[[model]]\npath = \"a\"\nmemory = \"much\"\n", &["line 3", "much"]),
        ("[[model]]\npath = \"a\"\npriority = \"high\"\n", &["line 3", "interactive"]),
        ("[[model]]\npath = \"a\"\npinned = 1\n", &["line 3", "true or false"]),
        ("[[model]]\npath = \"a\"\nlazy = 1\n", &["line 3", "true or false"]),
        ("[[model]]\npath = \"a\"\nlazy = true\npinned = true\n", &["line 1", "pinned", "lazy"]),
        ("[[model]]\nname = \"a b\"\npath = \"a\"\n", &["line 2", "spaces"]),
        ("[key]\nkey = \"a\"\n", &["line 1", "[[key]]"]),
        ("[[key]]\nkey = \"a\"\nweight = 0\n", &["line 3", "from 1 on"]),
        ("[[key]]\nkey = \"a\"\nruning = 1\n", &["line 3", "did you mean running?"]),
        ("pipelines = 1\n", &["line 1", "[pipelines.NAME]"]),
        ("key = 1\n", &["line 1", "[[key]]"]),
        ("[[key]]\nadmin = true\n", &["line 1", "key = \"secret\""]),
        ("[[key]]\nkey = \"a b\"\n", &["line 2", "printable ASCII"]),
        ("[[key]]\nkey = \"a\"\nadmn = true\n", &["line 3", "admn", "did you mean admin?"]),
        ("[pipelines]\na = 1\n", &["line 2", "a table", "router ="]),
        ("[pipelines.a]\nrouter = \"r\"\n", &["line 1", "needs a router, specialists and a fallback"]),
        ("[pipelines.a]\nrooter = \"r\"\n", &["line 2", "did you mean router?"]),
        ("[pipelines.a]\nspecialists = \"b\"\n", &["line 2", "LABEL"]),
        ("[pipelines.a]\nconfidence = 2\n", &["line 2", "from 0 to 1"]),
        ("[pipelines.\"a b\"]\n", &["line 1", "spaces"]),
        (
            "[[model]]\nname = \"a\"\npath = \"a\"\n[[model]]\nname = \"a\"\npath = \"b\"\n",
            &["line 4", "two models"],
        ),
    ] {
        let said = refused(text);
        for word in words {
            assert!(said.contains(word), "no {word:?} in {said:?}, of {text:?}");
        }
    }
}

#[test]
fn keys_are_read_with_their_shares() {
    let text = "[[key]]\nkey = \"a\"\nweight = 4\n[[key]]\nkey = \"b\"\nrunning = 1\nwaiting = 0\n";
    let found = file(text).unwrap();
    let key = |text: &str, weight, running, waiting| {
        let share = KeyShare { weight, running, waiting };
        ApiKey::new(text.into()).unwrap().with_share(share)
    };
    assert_eq!(found.keys(), [key("a", Some(4), None, None), key("b", None, Some(1), Some(0))]);
    assert!(!format!("{found:?}").contains("\"a\""), "keys are secrets");
}

#[test]
fn pipelines_are_read() {
    let text = "[pipelines.assistant]\nrouter = \"small\"\nfallback = \"small\"\nconfidence = 0.5\n\
                specialists = { code = \"coder\", short = \"small:summarize\" }\n";
    let expected = PipelineSpec::new("assistant", "small", "small")
        .with_specialist("code", "coder")
        .with_specialist("short", "small:summarize")
        .with_confidence(0.5);
    assert_eq!(file(text).unwrap().pipelines(), [expected]);
}

#[test]
fn models_are_read() {
    let text = "[[model]]\nname = \"small\"\npath = \"org/small\"\nmemory = \"600M\"\nheads = [\"chat\", \"code\"]\n\
                priority = \"interactive\"\npinned = true\n[[model]]\npath = \"other\"\n\
                [[model]]\npath = \"rare\"\nlazy = true\n";
    let found = file(text).unwrap();
    assert_eq!(
        found.models()[0],
        ModelEntry {
            name: Some("small".into()),
            path: "org/small".into(),
            memory: Some(600 << 20),
            reserved: Some(600 << 20),
            heads: vec!["chat".into(), "code".into()],
            priority: Some(firebox_runtime::schedule::Priority::Interactive),
            pinned: true,
            lazy: false,
        }
    );
    assert_eq!(found.models()[1], ModelEntry::of(Path::new("other")));
    assert_eq!(found.models()[2], ModelEntry { lazy: true, ..ModelEntry::of(Path::new("rare")) });
    assert!(
        found.models()[0].is_called(Path::new("small")) && !found.models()[1].is_called(Path::new("other"))
    );
}

#[test]
fn options_about_memory_want_memory_wherever_it_is_from() {
    let asked = |configuration: &Configuration, args: &[&str]| {
        let matches = configuration.over(Cli::command()).try_get_matches_from(args).unwrap();
        expect_memory(&matches, &configuration.models())
    };
    let without = Configuration::default();
    assert!(
        asked(&without, &["firebox", "run", "--mode", "context"])
            .unwrap_err()
            .to_string()
            .contains("--memory")
    );
    assert!(asked(&without, &["firebox", "run", "--mode", "context", "--memory", "1G"]).is_ok());
    assert!(asked(&without, &["firebox", "tokenize", "model"]).is_ok());
    let with = file("[defaults]\nmemory = \"1G\"\n").unwrap();
    assert!(asked(&with, &["firebox", "run", "--keep-layers", "2"]).is_ok());
    // A setting in `[defaults]` does not count as a request for it when a model runs without memory.
    let mode = file("[defaults]\nmode = \"context\"\n").unwrap();
    assert!(asked(&mode, &["firebox", "run"]).is_ok());
    // The memory of a model's entry counts for that model, and for a server of all models.
    let text = "[[model]]\nname = \"small\"\npath = \"a\"\nmemory = \"1G\"\n[[model]]\nname = \"other\"\npath = \"b\"\n";
    let own = file(text).unwrap();
    for with in [
        &["run", "small", "Hello"][..],
        &["run", "-m", "small"],
        &["chat", "small"],
        &["chat", "-m", "small"],
        &["bench", "small"],
        &["serve", "small"],
        &["serve", "other", "small"],
        &["serve"],
    ] {
        let args: Vec<&str> = ["firebox"].iter().chain(with).chain(&["--mode", "context"]).copied().collect();
        assert!(asked(&own, &args).is_ok(), "{args:?}");
    }
    for without in [&["run", "other", "small"][..], &["run"], &["chat", "other"], &["serve", "other"]] {
        let args: Vec<&str> =
            ["firebox"].iter().chain(without).chain(&["--placement", "last-n"]).copied().collect();
        assert!(asked(&own, &args).is_err(), "{args:?}");
    }
}
