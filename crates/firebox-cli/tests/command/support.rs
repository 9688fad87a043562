//! Starts the command, and makes models to start it on.

use std::ffi::OsStr;
use std::fs;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;

/// Exit codes, as the help has them.
pub const CHECK_FAILED: i32 = 1;
pub const USAGE: i32 = 2;
pub const UNUSABLE: i32 = 3;
pub const OUT_OF_CONTEXT: i32 = 4;
pub const INTERRUPTED: i32 = 130;

pub fn fixture(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(name);
    assert!(path.exists(), "{} is missing", path.display());
    path
}

/// A model of a family as GGUF, the one form in which the fixtures have a vocabulary.
pub fn gguf(family: &str) -> PathBuf {
    fixture(&format!("gguf/{family}/model.gguf"))
}

/// Returns the command, isolated from the settings of the user who runs the tests.
pub fn firebox() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_firebox"));
    for variable in [
        "HF_HOME",
        "HF_HUB_CACHE",
        "HF_ENDPOINT",
        "HF_TOKEN",
        "HF_TOKEN_PATH",
        "HF_HUB_OFFLINE",
        "HTTP_PROXY",
        "http_proxy",
        "HTTPS_PROXY",
        "https_proxy",
        "ALL_PROXY",
        "all_proxy",
    ] {
        command.env_remove(variable);
    }
    for (variable, _) in
        std::env::vars_os().filter(|(name, _)| name.as_encoded_bytes().starts_with(b"FIREBOX_"))
    {
        command.env_remove(variable);
    }
    // The command keeps its history apart from that of the user who runs the tests.
    let own = std::env::temp_dir().join(format!("firebox-tests-{}", std::process::id()));
    command.env("XDG_DATA_HOME", &own).env("XDG_CONFIG_HOME", own.join("config"));
    // A machine that does much else may take its time with a head.
    command.env("FIREBOX_HEAD_WAIT", "60000");
    command.env("NO_PROXY", "127.0.0.1").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// The result of a run of the command.
#[derive(Debug)]
pub struct Ran {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Ran {
    pub fn from(output: Output) -> Self {
        let ran = Self {
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        };
        assert!(!ran.stderr.contains("panicked"), "{}", ran.stderr);
        ran
    }

    /// Asserts the exit code.
    #[track_caller]
    pub fn ends_with(self, code: i32) -> Self {
        assert_eq!(self.code, Some(code), "stdout: {}\nstderr: {}", self.stdout, self.stderr);
        self
    }

    /// Asserts that it failed with one line that says all of these.
    #[track_caller]
    pub fn fails(self, code: i32, words: &[&str]) {
        let ran = self.ends_with(code);
        let error = ran.stderr.lines().find(|line| line.starts_with("error: "));
        let error = error.unwrap_or_else(|| panic!("no error line in {}", ran.stderr));
        for word in words {
            assert!(error.contains(word), "no {word:?} in {error}");
        }
    }

    /// Stdout as one JSON value.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error} in {}", self.stdout))
    }
}

pub fn firebox_with<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Ran {
    Ran::from(firebox().args(args).output().unwrap())
}

pub fn firebox_fed<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>, stdin: &str) -> Ran {
    let mut child = firebox().args(args).stdin(Stdio::piped()).spawn().unwrap();
    let mut pipe = child.stdin.take().unwrap();
    let text = stdin.to_owned();
    let writer = std::thread::spawn(move || {
        // The command may have left already, which its exit code will tell.
        let _ = pipe.write_all(text.as_bytes());
    });
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    Ran::from(output)
}

/// Starts the command with `--verbose` and waits until it has opened its model.
pub fn firebox_opened<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Child {
    let mut child = firebox().arg("--verbose").args(args).stdin(Stdio::piped()).spawn().unwrap();
    let stderr = child.stderr.as_mut().unwrap();
    let mut seen = Vec::new();
    let mut byte = [0];
    // Byte by byte, so that nothing is taken that the test wants to see.
    while !seen.ends_with(b" s\n") {
        assert_eq!(stderr.read(&mut byte).unwrap(), 1, "{}", String::from_utf8_lossy(&seen));
        seen.push(byte[0]);
    }
    assert!(seen.starts_with(b"opened "), "{}", String::from_utf8_lossy(&seen));
    child
}

/// The arguments of a call, of whatever they are made.
#[macro_export]
macro_rules! args {
    ($($arg:expr),* $(,)?) => { [$(std::ffi::OsString::from($arg.to_owned())),*] };
}

/// A copy of a model's directory to spoil.
pub fn copy_of(model: &str) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(fixture(model)).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), copy.path().join(entry.file_name())).unwrap();
    }
    copy
}

/// A tensor in memory.
pub struct Tensor {
    pub name: String,
    pub dtype: safetensors::Dtype,
    pub shape: Vec<usize>,
    pub data: Vec<u8>,
}

pub fn read_tensors(path: &Path) -> Vec<Tensor> {
    let bytes = fs::read(path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let owned = |(name, view): (String, safetensors::tensor::TensorView<'_>)| Tensor {
        name,
        dtype: view.dtype(),
        shape: view.shape().to_vec(),
        data: view.data().to_vec(),
    };
    file.tensors().into_iter().map(owned).collect()
}

pub fn write_tensors(path: &Path, tensors: &[Tensor]) {
    let view = |tensor: &Tensor| {
        let view =
            safetensors::tensor::TensorView::new(tensor.dtype, tensor.shape.clone(), &tensor.data).unwrap();
        (tensor.name.clone(), view.dtype(), view.shape().to_vec(), tensor.data.clone())
    };
    let owned: Vec<_> = tensors.iter().map(view).collect();
    let views = owned.iter().map(|(name, dtype, shape, data)| {
        (name.as_str(), safetensors::tensor::TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

/// Changes the tensors of a file.
pub fn edit_tensors(path: &Path, edit: impl FnOnce(&mut Vec<Tensor>)) {
    let mut tensors = read_tensors(path);
    edit(&mut tensors);
    write_tensors(path, &tensors);
}
