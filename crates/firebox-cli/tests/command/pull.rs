//! Tests of `firebox pull` against a local imitation of the hub.

use std::fs;
use std::path::Path;

use crate::args;
use crate::hub::{Behaviour, COMMIT, Hub};
use crate::support::*;

fn model_files() -> Vec<(String, Vec<u8>)> {
    let folder = fixture("gguf/llama/hf");
    let mut files: Vec<(String, Vec<u8>)> = ["config.json", "model.safetensors"]
        .map(|name| (name.to_owned(), fs::read(folder.join(name)).unwrap()))
        .into();
    files.push(("README.md".into(), b"not needed".to_vec()));
    files.push(("pytorch_model.bin".into(), vec![0; 1000]));
    files.push(("gguf/model-Q8.gguf".into(), fs::read(gguf("llama")).unwrap()));
    files.push(("generation_config.json".into(), b"{\"do_sample\": false}".to_vec()));
    files.push(("1_Pooling/config.json".into(), b"{\"pooling_mode_cls_token\": true}".to_vec()));
    files
}

fn pull(hub: &Hub, home: &Path, more: &[&str]) -> Ran {
    let args = ["pull", "org/name"].iter().chain(more);
    let output =
        firebox().args(args).env("HF_HOME", home).env("HF_ENDPOINT", &hub.endpoint).output().unwrap();
    Ran::from(output)
}

fn run_pulled(home: &Path) -> Ran {
    let args = args!["run", "org/name", "--ids", "1,2,3", "-n", "3", "--json"];
    Ran::from(firebox().args(args).env("HF_HOME", home).output().unwrap())
}

#[test]
fn a_model_is_fetched_once_and_runs_by_its_name() {
    let hub = Hub::serve(model_files());
    let home = tempfile::tempdir().unwrap();
    let ran = pull(&hub, home.path(), &[]).ends_with(0);
    let path = Path::new(ran.stdout.trim());
    assert!(path.ends_with(format!("hub/models--org--name/snapshots/{COMMIT}")), "{}", path.display());
    assert_eq!(fs::read(path.join("model.safetensors")).unwrap(), model_files()[1].1);
    assert!(!path.join("pytorch_model.bin").exists() && !path.join("README.md").exists());
    // Without it an encoder would pool as its makers do not, and say nothing.
    assert!(path.join("1_Pooling/config.json").exists());
    assert!(hub.requests().iter().all(|request| request.token.is_none()));
    firebox_with(args!["run", path, "--ids", "1", "-n", "1"]).ends_with(0);
    assert_eq!(run_pulled(home.path()).ends_with(0).json()["tokens"].as_array().unwrap().len(), 3);

    let again = pull(&hub, home.path(), &[]).ends_with(0);
    assert_eq!(again.stdout, ran.stdout);
    let requests = hub.requests();
    assert_eq!(requests.len(), 1, "only the list is asked for: {requests:?}");

    // A blob that is here already only has to be linked into the new snapshot.
    fs::remove_file(path.join("model.safetensors")).unwrap();
    pull(&hub, home.path(), &[]).ends_with(0);
    assert!(
        hub.requests()
            .iter()
            .all(|request| request.range.as_deref().is_none_or(|range| range == "bytes=0-0"))
    );
    run_pulled(home.path()).ends_with(0);
}

#[test]
fn weights_are_the_files_that_the_index_names() {
    let shard = "model.safetensors-00001-of-00001.safetensors";
    let mut files = model_files();
    files[1].0 = shard.to_owned();
    let index = serde_json::json!({"weight_map": {"a": shard}}).to_string();
    files.push(("model.safetensors.index.json".into(), index.into()));
    let home = tempfile::tempdir().unwrap();
    let ran = pull(&Hub::serve(files.clone()), home.path(), &[]).ends_with(0);
    assert_eq!(fs::read(Path::new(ran.stdout.trim()).join(shard)).unwrap(), files[1].1);
    files.remove(1);
    let home = tempfile::tempdir().unwrap();
    pull(&Hub::serve(files), home.path(), &[]).fails(UNUSABLE, &["org/name", shard, "--file"]);
}

#[test]
fn a_single_file_is_chosen_by_its_pattern() {
    let hub = Hub::serve(model_files());
    let home = tempfile::tempdir().unwrap();
    let ran = pull(&hub, home.path(), &["--file", "*Q8*.gguf"]).ends_with(0);
    assert!(ran.stdout.trim().ends_with("gguf/model-Q8.gguf"), "{}", ran.stdout);
    firebox_with(args!["run", ran.stdout.trim(), "Hello", "-n", "1"]).ends_with(0);
    pull(&hub, home.path(), &["--file", "*.onnx"]).fails(UNUSABLE, &["*.onnx", "README.md"]);
}

#[test]
fn a_broken_download_goes_on_where_it_stopped() {
    let hub = Hub::serve(model_files());
    let home = tempfile::tempdir().unwrap();
    let cut =
        |times| Behaviour { cut: Some(("model.safetensors".into(), 20_000, times)), ..Behaviour::default() };
    // Within one call, by itself.
    hub.behave(cut(2));
    pull(&hub, home.path(), &[]).ends_with(0);
    let ranges: Vec<_> = hub.requests().into_iter().filter_map(|request| request.range).collect();
    assert!(ranges.contains(&"bytes=20000-".into()) && ranges.contains(&"bytes=40000-".into()), "{ranges:?}");
    run_pulled(home.path()).ends_with(0);

    // Over two calls, when the server stays away for longer.
    let home = tempfile::tempdir().unwrap();
    hub.behave(Behaviour { cut: Some(("model.safetensors".into(), 3_000, 100)), ..Behaviour::default() });
    pull(&hub, home.path(), &[]).fails(UNUSABLE, &["model.safetensors", "go on"]);
    run_pulled(home.path()).ends_with(UNUSABLE);
    hub.requests();
    hub.behave(Behaviour::default());
    pull(&hub, home.path(), &[]).ends_with(0);
    let ranges: Vec<_> = hub.requests().into_iter().filter_map(|request| request.range).collect();
    assert!(!ranges.contains(&"bytes=0-".into()), "{ranges:?}");
    assert!(ranges.iter().any(|range| range.ends_with("000-") && range != "bytes=0-"), "{ranges:?}");
    let snapshot = home.path().join("hub/models--org--name/snapshots").join(COMMIT);
    assert_eq!(fs::read(snapshot.join("model.safetensors")).unwrap(), model_files()[1].1);
}

#[test]
fn a_partial_file_that_is_whole_or_too_long_is_no_trouble() {
    let hub = Hub::serve(model_files());
    let whole = model_files()[1].1.clone();
    let too_long = [&whole[..], b"more"].concat();
    for left_behind in [&whole[..], &too_long[..]] {
        let home = tempfile::tempdir().unwrap();
        let blobs = home.path().join("hub/models--org--name/blobs");
        fs::create_dir_all(&blobs).unwrap();
        fs::write(blobs.join("etag-of-model-safetensors.part"), left_behind).unwrap();
        pull(&hub, home.path(), &[]).ends_with(0);
        let snapshot = home.path().join("hub/models--org--name/snapshots").join(COMMIT);
        assert_eq!(fs::read(snapshot.join("model.safetensors")).unwrap(), whole);
    }
}

#[test]
fn the_token_is_sent() {
    let hub = Hub::serve(model_files());
    let home = tempfile::tempdir().unwrap();
    let with_token = |token: &str| {
        let mut command = firebox();
        command.args(["pull", "org/name"]).env("HF_HOME", home.path()).env("HF_ENDPOINT", &hub.endpoint);
        Ran::from(command.env("HF_TOKEN", token).output().unwrap())
    };
    with_token("hf_secret").ends_with(0);
    let requests = hub.requests();
    assert!(requests.len() > 3);
    assert!(
        requests.iter().all(|request| request.token.as_deref() == Some("Bearer hf_secret")),
        "{requests:?}"
    );
    with_token("two\nlines").fails(USAGE, &["HF_TOKEN"]);
    fs::write(home.path().join("token"), "hf_from_file\n").unwrap();
    pull(&hub, home.path(), &[]).ends_with(0);
    assert_eq!(hub.requests()[0].token.as_deref(), Some("Bearer hf_from_file"));
}

#[test]
fn refusals_say_what_to_do() {
    let hub = Hub::serve(model_files());
    let home = tempfile::tempdir().unwrap();
    for (status, words) in
        [(401, "HF_TOKEN"), (403, "accept the model's terms"), (404, "no such model"), (503, "try again")]
    {
        hub.behave(Behaviour { status: Some(status), ..Behaviour::default() });
        pull(&hub, home.path(), &[]).fails(UNUSABLE, &["org/name", &status.to_string(), words]);
    }
    hub.behave(Behaviour::default());
    pull(&hub, home.path(), &["--revision", "other"]).fails(UNUSABLE, &["404", "other"]);
    pull(&hub, home.path(), &["--revision", "../x"]).fails(USAGE, &["--revision"]);
    firebox_with(args!["pull", "just-a-name"]).fails(USAGE, &["ORG/NAME"]);
    let endpoint = hub.endpoint.clone();
    drop(hub);
    std::thread::sleep(std::time::Duration::from_millis(100));
    let output = firebox()
        .args(["pull", "org/name"])
        .env("HF_HOME", home.path())
        .env("HF_ENDPOINT", &endpoint)
        .output()
        .unwrap();
    Ran::from(output).fails(UNUSABLE, &["cannot reach", &endpoint]);
}

#[test]
fn offline_means_the_cache_alone() {
    let hub = Hub::serve(model_files());
    let home = tempfile::tempdir().unwrap();
    let offline = |more: &[&str]| {
        let mut command = firebox();
        command.args(["pull", "org/name"].iter().chain(more)).env("HF_HOME", home.path());
        Ran::from(command.env("HF_ENDPOINT", &hub.endpoint).env("HF_HUB_OFFLINE", "1").output().unwrap())
    };
    offline(&[]).fails(UNUSABLE, &["not in the cache", "HF_HUB_OFFLINE"]);
    assert!(hub.requests().is_empty());
    let online = pull(&hub, home.path(), &[]).ends_with(0);
    hub.requests();
    assert_eq!(offline(&[]).ends_with(0).stdout, online.stdout);
    offline(&["--file", "*.gguf"]).fails(UNUSABLE, &["*.gguf"]);
    fs::remove_file(Path::new(online.stdout.trim()).join("model.safetensors")).unwrap();
    offline(&[]).fails(UNUSABLE, &["model.safetensors", "HF_HUB_OFFLINE"]);
    assert!(hub.requests().is_empty());
}

#[test]
fn a_server_that_names_files_outside_is_not_obeyed() {
    let mut files = model_files();
    files.push(("segments/../../../../evil".into(), b"evil".to_vec()));
    files.push(("firebox.json".into(), b"{}".to_vec()));
    let hub = Hub::serve(files);
    let home = tempfile::tempdir().unwrap();
    pull(&hub, home.path(), &[]).fails(UNUSABLE, &["evil", "outside"]);
}
