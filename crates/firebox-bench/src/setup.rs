//! The models that are measured: random numbers in the shape of published ones, made once.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use firebox_store::{Bits, Heads, ImportOptions, Quantization, Segment, SegmentId, import};
use firebox_train::cut_head;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use firebox_testing::model::SyntheticModel;

/// One that takes no time, and whose figures mean nothing.
const TINY: SyntheticModel = SyntheticModel {
    layers: 8,
    hidden: 256,
    inner: 512,
    heads: 4,
    kv_heads: 2,
    head_dim: 64,
    vocab: 4096,
    has_normed_heads: true,
};

/// The head that is installed beside the quantized model, with others beside it that are not asked for, and of how many
/// of 28 layers they are.
pub const HEAD: &str = "other";
const HEADS: [&str; 3] = [HEAD, "second", "third"];
const HEAD_LAYERS: (usize, usize) = (6, 28);

/// Numbers that share a scale.
const GROUP: usize = 32;

const SEED: u64 = 7;

/// The settings of a measurement.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Setup {
    /// Where models are made and results are written.
    pub out: PathBuf,
    /// A given model to measure instead of the synthetic one, its weights not quantized.
    pub model: Option<PathBuf>,
    /// A Python that has llama.cpp.
    pub peer: Option<PathBuf>,
    /// Tokens of the long prompt, if given on the command line.
    pub long: Option<usize>,
    pub rounds: usize,
    pub is_quick: bool,
}

impl Setup {
    /// Returns the folder in which generated models are kept for later runs.
    pub fn models(&self) -> PathBuf {
        self.out.join("models").join(match &self.model {
            // Two folders of the same name are two models.
            Some(path) => path.to_string_lossy().replace(['/', '\\', ':'], "-"),
            None if self.is_quick => "tiny".into(),
            None => "0.6b".into(),
        })
    }

    /// The model with its weights as they are.
    pub fn plain(&self) -> PathBuf {
        self.model.clone().unwrap_or_else(|| self.models().join("bf16"))
    }

    /// Returns the path of the model in 4 bits, with heads beside it.
    pub fn q4(&self) -> PathBuf {
        self.models().join("q4")
    }

    /// Returns the path of the model in 8 bits.
    pub fn q8(&self) -> PathBuf {
        self.models().join("q8")
    }

    /// As it is said of tables of figures.
    pub fn described(&self) -> String {
        match &self.model {
            Some(path) => path.display().to_string(),
            None if self.is_quick => "a quick run of tiny models, whose figures mean nothing".into(),
            None => {
                format!("random weights in the shape of Qwen3-0.6B, bf16 and 4 bits in groups of {GROUP}")
            }
        }
    }

    /// Returns `quick` in a quick run, else `usual`.
    pub fn usual_or<T>(&self, usual: T, quick: T) -> T {
        if self.is_quick { quick } else { usual }
    }

    /// Generates the models that are missing.
    pub fn prepare(&self) -> anyhow::Result<()> {
        fs::create_dir_all(self.models()).with_context(|| {
            format!("cannot make {}; name another folder by --out", self.models().display())
        })?;
        if self.model.is_none() {
            let made = if self.is_quick { TINY } else { SyntheticModel::QWEN3_0_6B };
            once(&self.plain(), |folder| {
                made.write(folder, SEED)?;
                fs::write(folder.join("tokenizer.json"), tokenizer(made.vocab).to_string())?;
                // Pages that are not written to the disk yet cannot be dropped from the page cache.
                Ok(fs::File::open(folder.join("tokenizer.json"))?.sync_all()?)
            })?;
        }
        self.quantize(&self.q4(), Bits::Q4)?;
        if self.peer.is_some() {
            self.quantize(&self.q8(), Bits::Q8)?;
        }
        self.install_heads()
    }

    fn quantize(&self, bundle: &Path, bits: Bits) -> anyhow::Result<()> {
        if bundle.exists() {
            return Ok(());
        }
        let options = ImportOptions::from(Some(Quantization { bits, group: GROUP }));
        import(self.plain(), bundle, &options, &mut |_| ())
            .with_context(|| format!("{} should be a model that is not quantized", self.plain().display()))?;
        Ok(())
    }

    fn install_heads(&self) -> anyhow::Result<()> {
        let heads = Heads::open(self.q4())?;
        let installed = heads.list()?;
        let missing = |name: &&str| !installed.iter().any(|head| head.name == **name);
        let missing: Vec<&str> = HEADS.into_iter().filter(missing).collect();
        if missing.is_empty() {
            return Ok(());
        }
        let is_layer = |segment: &Segment| matches!(segment.id, SegmentId::Layer(_));
        let layers = heads.model().segments().iter().filter(|segment| is_layer(segment)).count();
        let beside = tempfile::tempdir_in(self.models())?;
        let cut = beside.path().join(HEAD);
        let count = (layers * HEAD_LAYERS.0 / HEAD_LAYERS.1).max(1);
        ensure!(
            cut_head(heads.model(), count, &cut)?.is_some(),
            "{} has {layers} layers, too few for a head",
            self.plain().display()
        );
        missing.into_iter().try_for_each(|name| heads.install(&cut, name).map(drop))?;
        Ok(())
    }
}

/// Makes a folder unless it is there; one that was not finished is made anew.
pub fn once(folder: &Path, make: impl FnOnce(&Path) -> anyhow::Result<()>) -> anyhow::Result<()> {
    if folder.exists() {
        return Ok(());
    }
    let partial = folder.with_extension("partial");
    if partial.exists() {
        fs::remove_dir_all(&partial)?;
    }
    make(&partial)?;
    Ok(fs::rename(&partial, folder)?)
}

/// A tokenizer of so many tokens, because what it takes in memory counts: all bytes, all pairs of them, and as many triples
/// as there is room for.
fn tokenizer(vocab: usize) -> Value {
    let bytes: Vec<String> = byte_characters().map(String::from).collect();
    let pair = |at: usize| (bytes[at / bytes.len()].clone(), bytes[at % bytes.len()].clone());
    let pairs = bytes.len() * bytes.len();
    let merges: Vec<(String, String)> = (0..vocab.saturating_sub(bytes.len()))
        .map(|at| match at.checked_sub(pairs) {
            None => pair(at),
            Some(at) => {
                let (first, second) = pair(at % pairs);
                (first + &second, bytes[at / pairs].clone())
            }
        })
        .collect();
    let joined = merges.iter().map(|(first, second)| format!("{first}{second}"));
    let table: Map<String, Value> =
        bytes.iter().cloned().chain(joined).zip(0..).map(|(token, id)| (token, json!(id))).collect();
    let merges: Vec<String> = merges.into_iter().map(|(first, second)| format!("{first} {second}")).collect();
    let byte_level = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true,
    });
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": table, "merges": merges,
        },
    })
}

/// Returns the characters that byte-level tokenizers write for each byte: itself if it is visible, else the next one from
/// 256 on.
fn byte_characters() -> impl Iterator<Item = char> {
    let is_seen = |byte: &u8| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let hidden = (0..=u8::MAX).filter(move |byte| !is_seen(byte)).zip('\u{100}'..).map(|(_, shown)| shown);
    (0..=u8::MAX).filter(move |byte| is_seen(byte)).map(char::from).chain(hidden)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn a_tokenizer_has_as_many_tokens_as_its_model() {
        let all: HashSet<char> = byte_characters().collect();
        assert_eq!(all.len(), 256);
        for vocab in [300, TINY.vocab, 70_000] {
            let tokenizer = tokenizer(vocab);
            assert_eq!(tokenizer["model"]["vocab"].as_object().unwrap().len(), vocab);
            assert_eq!(tokenizer["model"]["merges"].as_array().unwrap().len(), vocab - 256);
        }
    }

    #[test]
    fn complete_files_are_reused_and_incomplete_ones_made_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("made");
        let make = |folder: &Path| Ok(fs::create_dir(folder)?);
        assert!(once(&path, |folder| make(folder).and_then(|()| anyhow::bail!("interrupted"))).is_err());
        assert!(!path.exists());
        once(&path, make).unwrap();
        once(&path, |_| anyhow::bail!("made twice")).unwrap();
        assert!(path.exists());
    }
}
