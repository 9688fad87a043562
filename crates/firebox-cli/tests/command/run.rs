//! Tests of `firebox run`.

use std::io::Read as _;
use std::process::Child;
use std::time::{Duration, Instant};

use crate::args;
use crate::support::*;

const FAMILIES: [&str; 9] =
    ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "qwen3_5_text", "gemma3_text", "smollm3", "phi3"];

#[test]
fn json_is_one_object_with_everything_in_it() {
    let ran =
        firebox_with(args!["run", gguf("llama"), "Hello", "-n", "12", "--json", "--seed", "7"]).ends_with(0);
    assert_eq!(ran.stdout.lines().count(), 1);
    let json = ran.json();
    assert!(json["text"].is_string());
    let tokens = json["tokens"].as_array().unwrap();
    assert!(tokens.len() <= 12 && tokens.iter().all(|token| token.is_u64()));
    assert!(json["prompt_tokens"].as_u64().unwrap() > 0);
    for field in ["ttft_ms", "prefill_tps", "decode_tps", "peak_rss_mib"] {
        assert!(json[field].as_f64().unwrap() >= 0.0, "{field}");
    }
    assert!(["stop", "length"].contains(&json["finish"].as_str().unwrap()));
    assert_eq!(json["seed"], 7);
}

#[test]
fn a_seed_gives_the_same_text_and_others_another() {
    let tokens = |seed: &str| {
        let args = args!["run", gguf("llama"), "Hello", "-n", "24", "--json", "--ignore-eos", "--seed", seed];
        firebox_with(args).ends_with(0).json()["tokens"].clone()
    };
    let first = tokens("1");
    assert_eq!(first, tokens("1"));
    assert!((2..6).any(|seed| tokens(&seed.to_string()) != first));
}

#[test]
fn without_a_seed_the_report_has_the_one_that_was_drawn() {
    let run = |seed: &[&str]| {
        let base = ["run", "--prompt", "Hello", "-n", "8", "--json", "--ignore-eos", "-m"];
        let model = gguf("llama");
        firebox_with(base.iter().copied().chain([model.to_str().unwrap()]).chain(seed.iter().copied()))
            .ends_with(0)
            .json()
    };
    let drawn = run(&[]);
    let again = run(&["--seed", &drawn["seed"].to_string()]);
    assert_eq!(drawn["tokens"], again["tokens"]);
}

#[test]
fn every_form_of_a_checkpoint_gives_the_same_tokens() {
    for family in FAMILIES {
        let ids = "5,9,17,33,4,21,60,7,11";
        let tokens = |model: std::path::PathBuf| {
            let args = args!["run", model, "--ids", ids, "-n", "24", "--temp", "0", "--json"];
            let json = firebox_with(args).ends_with(0).json();
            assert_eq!(json["prompt_tokens"], 9);
            (json["tokens"].clone(), json["finish"].clone())
        };
        let directory = fixture(&format!("gguf/{family}/hf"));
        let expected = tokens(directory.clone());
        assert_eq!(tokens(gguf(family)), expected, "{family}");
        let folder = tempfile::tempdir().unwrap();
        for (source, name) in [(directory, "from-hf"), (gguf(family), "from-gguf")] {
            let bundle = folder.path().join(name);
            firebox_with(args!["import", source, bundle]).ends_with(0);
            assert_eq!(tokens(bundle), expected, "{family} {name}");
        }
    }
}

#[test]
fn the_text_streams_to_stdout_and_remarks_to_stderr() {
    let model = gguf("llama");
    let json =
        firebox_with(args!["run", model, "Hello", "-n", "8", "--temp", "0", "--json"]).ends_with(0).json();
    let plain = firebox_with(args!["run", model, "Hello", "-n", "8", "--temp", "0"]).ends_with(0);
    assert_eq!(plain.stdout.trim_end_matches('\n'), json["text"].as_str().unwrap().trim_end_matches('\n'));
    let verbose = firebox_with(args!["-v", "run", model, "Hello", "-n", "8", "--temp", "0"]).ends_with(0);
    assert!(verbose.stderr.contains("prompt tokens"), "{}", verbose.stderr);
    let quiet = firebox_with(args!["-q", "run", model, "Hello", "-n", "8", "--temp", "0"]).ends_with(0);
    assert_eq!((quiet.stdout, quiet.stderr.as_str()), (plain.stdout, ""));
}

#[test]
fn a_prompt_comes_from_stdin_too() {
    let model = gguf("llama");
    let run = |prompt: &[&str], stdin: &str| {
        let model = model.to_str().unwrap();
        let args = ["run", model, "-n", "6", "--temp", "0", "--json"];
        firebox_fed(args.iter().chain(prompt), stdin).ends_with(0).json()["tokens"].clone()
    };
    assert_eq!(run(&["Hello there"], "ignored"), run(&[], "Hello there\n"));
    firebox_fed(args!["run", model], "\u{feff}ok \u{0}").ends_with(0);
}

#[test]
fn as_many_tokens_as_asked_for() {
    let model = fixture("gguf/llama/hf");
    for n in [0usize, 1, 5] {
        let args = args!["run", model, "--ids", "[1, 2, 3]", "-n", n.to_string(), "--ignore-eos", "--json"];
        let json = firebox_with(args).ends_with(0).json();
        assert_eq!(json["tokens"].as_array().unwrap().len(), n);
        assert_eq!(json["finish"], "length");
    }
    let ran =
        firebox_with(args!["run", model, "--ids", "1 2 3", "-n", "-1", "--ignore-eos", "-c", "20", "--json"]);
    assert_eq!(ran.ends_with(0).json()["tokens"].as_array().unwrap().len(), 17);
    let ran = firebox_with(args!["run", model, "--ids", "1 2 3", "-n", "3", "--temp", "0"]).ends_with(0);
    assert_eq!(
        ran.stdout.split_whitespace().count(),
        3,
        "without a tokenizer, ids are printed: {}",
        ran.stdout
    );
}

#[test]
fn the_answer_ends_before_a_stop_string() {
    let model = gguf("llama");
    let run = |stop: &[&str]| {
        let model = model.to_str().unwrap();
        let args = ["run", model, "Hello", "-n", "30", "--temp", "0", "--ignore-eos", "--json"];
        firebox_with(args.iter().chain(stop)).ends_with(0).json()
    };
    let whole = run(&[]);
    let text = whole["text"].as_str().unwrap();
    let letters: Vec<char> = text.chars().collect();
    assert!(letters.len() >= 8, "the fixture says too little: {text:?}");
    // No control token is among them, behind which a stop string would not go on.
    let stop: String = letters[6..9].iter().collect();
    let stopped = run(&["--stop", "--not in there--", "--stop", &stop]);
    assert_eq!(stopped["finish"], "stop");
    assert_eq!(stopped["text"].as_str().unwrap(), &text[..text.find(&stop).unwrap()]);
    firebox_with(args!["run", model, "Hello", "--stop", ""]).fails(USAGE, &["--stop"]);
}

#[test]
fn a_bias_decides() {
    let model = fixture("gguf/llama/hf");
    let run = |bias: &str| {
        let args =
            args!["run", model, "--ids", "1,2,3", "-n", "4", "--temp", "0", "--json", "--logit-bias", bias];
        firebox_with(args)
    };
    assert_eq!(run("42=1000").ends_with(0).json()["tokens"], serde_json::json!([42, 42, 42, 42]));
    for bad in ["42", "42=x", "nothing=1"] {
        run(bad).fails(USAGE, &["--logit-bias"]);
    }
}

#[test]
fn a_chat_template_is_used_unless_raw() {
    let folder = tempfile::tempdir().unwrap();
    let template = folder.path().join("template.jinja");
    let source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if enable_thinking is defined %}\
                  {{ 'think' if enable_thinking else 'answer at once' }}{% endif %}";
    std::fs::write(&template, source).unwrap();
    let model = gguf("llama");
    let prompt_tokens = |more: &[&str]| {
        let model = model.to_str().unwrap();
        let args = ["run", model, "Hi", "-n", "1", "--json"];
        firebox_with(args.iter().chain(more)).ends_with(0).json()["prompt_tokens"].as_u64().unwrap()
    };
    let template = template.to_str().unwrap();
    let templated = prompt_tokens(&["--chat-template", template]);
    assert!(templated > prompt_tokens(&["--raw"]));
    assert!(prompt_tokens(&["--chat-template", template, "--system", "You are brief."]) > templated);
    let thinking = prompt_tokens(&["--chat-template", template, "--think"]);
    let at_once = prompt_tokens(&["--chat-template", template, "--no-think"]);
    assert!(templated < thinking && thinking < at_once);
    let ran = firebox_with(args!["run", model, "Hi", "-n", "1"]).ends_with(0);
    assert!(ran.stderr.contains("no chat template"), "{}", ran.stderr);
    firebox_with(args!["run", model, "Hi", "--system", "Be brief."]).fails(USAGE, &["--chat-template"]);
    firebox_with(args!["run", model, "Hi", "--raw", "--system", "x"]).ends_with(USAGE);
    std::fs::write(template, "{% for %}").unwrap();
    firebox_with(args!["run", model, "Hi", "--chat-template", template])
        .fails(UNUSABLE, &["does not compile"]);
}

#[test]
fn senseless_options_are_usage_errors() {
    let model = fixture("gguf/llama/hf");
    firebox_with(args!["run", model, "--ids", "1,x"]).fails(USAGE, &["\"x\""]);
    firebox_with(args!["run", model, "--ids", ""]).fails(USAGE, &["--ids"]);
    firebox_with(args!["run", model, "Hi", "--ids", "1"]).fails(USAGE, &["not both"]);
    firebox_with(args!["run", model, "Hi", "-p", "Ho"]).fails(USAGE, &["twice"]);
    firebox_with(args!["run", model, "--ids", "1", "--top-p", "2"]).fails(USAGE, &["top_p"]);
    firebox_with(args!["run", model, "--ids", "1", "--device", "abacus"]).fails(USAGE, &["abacus"]);
    firebox_with(args!["run", model, "--ids", "1", "-t", "0"]).ends_with(USAGE);
    firebox_with(args!["frobnicate"]).ends_with(USAGE);
}

#[test]
fn unusable_arguments_say_why() {
    firebox_with(args!["run", fixture("gguf/llama/hf"), "Hello"])
        .fails(UNUSABLE, &["--ids", "tokenizer.json"]);
    firebox_with(args!["run", fixture("gguf/llama/hf"), "--ids", "70000"]).fails(UNUSABLE, &["70000"]);
    firebox_with(args!["run", fixture("reference/bert"), "--ids", "1"]).fails(UNUSABLE, &["encoder"]);
    firebox_with(args!["run", "no/such-model", "Hello"]).fails(UNUSABLE, &["firebox pull no/such-model"]);
}

#[test]
fn too_long_a_prompt_is_out_of_context() {
    let model = fixture("gguf/llama/hf");
    firebox_with(args!["run", model, "--ids", "1,2,3,4", "-c", "4"]).fails(OUT_OF_CONTEXT, &["context of 4"]);
    let many = vec!["1"; 300].join(",");
    firebox_with(args!["run", model, "--ids", many]).fails(OUT_OF_CONTEXT, &["256"]);
}

#[test]
fn threads_and_device_come_from_the_command_line_or_the_environment() {
    let model = fixture("gguf/llama/hf");
    let args = args!["run", model, "--ids", "1,2", "-n", "2", "-t", "1", "--device", "cpu", "--json"];
    assert_eq!(firebox_with(args).ends_with(0).json()["device"], "cpu");
    let output =
        firebox().args(args!["run", model, "--ids", "1"]).env("FIREBOX_DEVICE", "abacus").output().unwrap();
    Ran::from(output).fails(USAGE, &["abacus"]);
    assert!(firebox_with(args!["devices"]).ends_with(0).stdout.contains("cpu"));
    assert!(firebox_with(args!["--version"]).ends_with(0).stdout.starts_with("firebox "));
    assert!(firebox_with(args!["--help"]).ends_with(0).stdout.contains("Exit codes"));
}

#[test]
#[cfg(target_os = "linux")]
fn a_closed_stdout_ends_it_quietly() {
    let model = fixture("gguf/llama/hf");
    let args = args!["run", model, "--ids", "1", "-n", "100000", "-c", "100000", "--ignore-eos"];
    let mut child = firebox().args(args).spawn().unwrap();
    let mut first = [0; 4];
    child.stdout.take().unwrap().read_exact(&mut first).unwrap();
    let ran = Ran::from(child.wait_with_output().unwrap()).ends_with(0);
    assert!(!ran.stderr.contains("error"), "{}", ran.stderr);
}

/// Waits until a process has computed for a third of a second, however slow the machine is.
#[cfg(target_os = "linux")]
fn works_a_while(child: &Child) {
    // In hundredths of a second, by the process and by the system for it.
    let worked = || {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
        let (_, fields) = stat.rsplit_once(')').unwrap();
        fields.split_whitespace().skip(11).take(2).map(|ticks| ticks.parse::<u64>().unwrap()).sum::<u64>()
    };
    let (began, before) = (Instant::now(), worked());
    while worked() < before + 33 {
        assert!(began.elapsed() < Duration::from_secs(120), "it does nothing");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[cfg(all(unix, not(target_os = "linux")))]
fn works_a_while(_: &Child) {
    std::thread::sleep(Duration::from_millis(500));
}

#[cfg(unix)]
pub fn signal(child: &Child, name: &str) {
    let pid = child.id().to_string();
    let status = std::process::Command::new("kill").args([&format!("-{name}"), &pid]).status().unwrap();
    assert!(status.success());
}

#[test]
#[cfg(unix)]
fn ctrl_c_stops_the_answer_and_still_reports() {
    let model = gguf("llama");
    let args = args!["run", model, "Hello", "-n", "1000000", "-c", "1000000", "--ignore-eos", "--json"];
    let child = firebox_opened(args);
    works_a_while(&child);
    signal(&child, "INT");
    let began = Instant::now();
    let ran = Ran::from(child.wait_with_output().unwrap()).ends_with(INTERRUPTED);
    assert!(began.elapsed() < Duration::from_secs(60));
    let json = ran.json();
    assert_eq!(json["finish"], "cancelled");
    assert!(!json["tokens"].as_array().unwrap().is_empty());
}

#[test]
#[cfg(unix)]
fn ctrl_c_stops_a_long_prompt_too() {
    let model = fixture("gguf/llama/hf");
    let ids: Vec<String> = (0..30_000).map(|at| (at % 150).to_string()).collect();
    let args = args!["run", model, "--ids", ids.join(","), "-c", "1000000", "--json"];
    let child = firebox_opened(args);
    works_a_while(&child);
    signal(&child, "INT");
    let json = Ran::from(child.wait_with_output().unwrap()).ends_with(INTERRUPTED).json();
    assert_eq!(json["finish"], "cancelled");
    assert!(json["prompt_tokens"].as_u64().unwrap() < 30_000);
}

#[test]
#[cfg(unix)]
fn a_second_ctrl_c_ends_it_at_once() {
    let model = fixture("gguf/llama/hf");
    let args = args!["run", model, "--ids", "1", "-c", "1000000", "--ignore-eos", "--json"];
    let child = firebox_opened(args);
    works_a_while(&child);
    // Stopped, it sees both together.
    signal(&child, "STOP");
    signal(&child, "INT");
    signal(&child, "CONT");
    signal(&child, "INT");
    Ran::from(child.wait_with_output().unwrap()).ends_with(INTERRUPTED);
}

#[test]
fn an_answer_ends_at_its_token_with_or_without_a_tokenizer() {
    let copy = copy_of("gguf/llama/hf");
    let run = |more: &[&str]| {
        let path = copy.path().to_str().unwrap().to_owned();
        let args = ["run", &path, "--ids", "1,2,3", "-n", "20", "--temp", "0", "--json"];
        firebox_with(args.iter().copied().chain(more.iter().copied())).ends_with(0).json()
    };
    let whole = run(&[]);
    let tokens = whole["tokens"].as_array().unwrap();
    let end = &tokens[tokens.len() / 2];
    let first = tokens.iter().position(|token| token == end).unwrap();
    std::fs::write(copy.path().join("generation_config.json"), format!("{{\"eos_token_id\": [7, {end}]}}"))
        .unwrap();
    let ended = run(&[]);
    assert_eq!(ended["finish"], "stop");
    assert_eq!(ended["tokens"].as_array().unwrap()[..], tokens[..first]);
    assert_eq!(run(&["--ignore-eos"])["tokens"], whole["tokens"]);
}

#[test]
fn the_makers_settings_are_the_defaults() {
    let copy = copy_of("gguf/llama/hf");
    let run = |more: &[&str]| {
        let path = copy.path().to_str().unwrap().to_owned();
        let args = ["run", &path, "--ids", "1,2,3", "-n", "12", "--json"];
        firebox_with(args.iter().copied().chain(more.iter().copied())).ends_with(0).json()["tokens"].clone()
    };
    let greedy = run(&["--temp", "0"]);
    std::fs::write(copy.path().join("generation_config.json"), "{\"do_sample\": false}").unwrap();
    assert_eq!(run(&["--seed", "5"]), greedy);
    std::fs::write(copy.path().join("generation_config.json"), "{\"temperature\": 2.0, \"top_k\": 1}")
        .unwrap();
    assert_eq!(run(&["--seed", "5"]), greedy);
}

#[test]
fn drafts_change_no_token() {
    let (model, ids) = (gguf("llama"), "5,9,17,33,5,9,17,33,5,9");
    let small = fixture("variants/qwen3-bias-legacy-config");
    let other = fixture("reference/qwen3");
    for sampling in [&["--temp", "0"], &["--seed", "3"]] {
        let run = |more: &[&str]| {
            let base = ["run", model.to_str().unwrap(), "--ids", ids, "-n", "64", "--ignore-eos", "--json"];
            firebox_with(base.iter().chain(sampling).chain(more)).ends_with(0).json()
        };
        let plain = run(&[]);
        assert_eq!((&plain["drafted_tokens"], &plain["accepted_tokens"]), (&0.into(), &0.into()));
        let itself = model.to_str().unwrap();
        let drafts: [&[&str]; 4] = [
            &["--lookup"],
            &["--lookup", "--draft-tokens", "3"],
            &["--draft", itself],
            &["--draft", small.to_str().unwrap(), "--draft-tokens", "5"],
        ];
        for draft in drafts {
            let found = run(draft);
            assert_eq!(found["tokens"], plain["tokens"], "{draft:?}");
            assert_eq!(found["text"], plain["text"]);
        }
    }
    let refused = |more: &[&str]| {
        let base = ["run", model.to_str().unwrap(), "--ids", ids, "-n", "4"];
        firebox_with(base.iter().chain(more))
    };
    refused(&["--draft", other.to_str().unwrap()]).fails(USAGE, &["320 tokens and not 160", "same family"]);
    refused(&["--draft-tokens", "4"]).fails(USAGE, &["--lookup"]);
    refused(&["--lookup", "--draft", "x"]).ends_with(USAGE);
}
