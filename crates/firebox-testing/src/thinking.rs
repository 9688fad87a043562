//! A model that thinks before it answers.

use std::path::Path;

use serde_json::Value;

/// The tokens of the pocket model that become the marks of thoughts: asked who it is, it says "I am the pocket model of Firebox."
const MARKS: [(&str, &str); 2] = [("▁I", "<think>"), ("▁of", "</think>")];

/// Its thoughts and its answer when it is asked who it is.
pub const THOUGHTS: &str = "am the pocket model";
/// See [`THOUGHTS`].
pub const ANSWER: &str = "Firebox.";

/// Writes the pocket model into a folder, with marks of thoughts for two of its words and a template that knows them.
pub fn write(folder: &Path) {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/pocket");
    for name in ["config.json", "model.safetensors", "generation_config.json"] {
        std::fs::copy(from.join(name), folder.join(name)).expect("the pocket model can be copied");
    }
    let read = |name: &str| {
        let bytes = std::fs::read(from.join(name)).expect("the pocket model has a tokenizer");
        serde_json::from_slice::<Value>(&bytes).expect("it is JSON")
    };
    let write = |name: &str, value: &Value| {
        std::fs::write(folder.join(name), value.to_string()).expect("the folder can be written")
    };
    let mut tokenizer = read("tokenizer.json");
    let model = &mut tokenizer["model"];
    for (token, mark) in MARKS {
        let vocabulary = model["vocab"].as_object_mut().expect("an object");
        let id = vocabulary.remove(token).expect("a token");
        vocabulary.insert(mark.into(), id);
        let is_of = |merge: &Value| {
            let [one, other] = [0, 1].map(|at| merge[at].as_str().expect("a token"));
            one == token || other == token || format!("{one}{other}") == token
        };
        model["merges"].as_array_mut().expect("a list").retain(|merge| !is_of(merge));
    }
    write("tokenizer.json", &tokenizer);
    let mut config = read("tokenizer_config.json");
    let template = config["chat_template"].as_str().expect("a text");
    let template = template.replace("m.content", "m.content.split('</think>')[-1]");
    config["chat_template"] = template.into();
    write("tokenizer_config.json", &config);
}
