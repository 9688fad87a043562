//! Model checkpoints on disk: Hugging Face directories, GGUF files and Firebox bundles, as one shape.
//!
//! [`Checkpoint::open`] takes any of the three. Everything after it sees Hugging Face tensor names, a Hugging Face
//! `config.json` and the text assets; the weights are slices of a mapping, read from disk when they are touched.
//!
//! ```no_run
//! use firebox_store::Checkpoint;
//!
//! # fn main() -> Result<(), firebox_store::StoreError> {
//! let model = Checkpoint::open("models/qwen3-0.6b")?;
//! for segment in model.segments() {
//!     println!("{}: {} tensors, {} bytes", segment.id, segment.tensors.len(), segment.bytes);
//! }
//! let embeddings = model.weight("model.embed_tokens.weight")?;
//! assert!(embeddings.mapped);
//! # Ok(())
//! # }
//! ```
//!
//! # The bundle
//!
//! [`import()`] writes a directory of
//!
//! ```text
//! firebox.json                       the manifest: segments, tensors, encodings, hashes
//! config.json  tokenizer.json  …     as the source had them
//! gguf-vocabulary.json               the tokenizer, where the source was a GGUF file
//! segments/embed.safetensors         token (and position) embeddings
//! segments/layer-0000.safetensors    one file for each block
//! segments/final.safetensors         final norm and unembedding
//! segments/other.safetensors         what no text model asks for
//! ```
//!
//! Every segment is a valid safetensors file whose tensors start on multiples of 64 bytes. A quantized weight `W` is
//! U8 under `W` with F16 scales under `W.scales` (see [`Quantization`]); blocks of GGUF are U8. The manifest has the
//! logical shape and the encoding of each. Space between tensors is taken up by U8 tensors named `__pad_…`, which the
//! manifest does not list. Where nothing is packed, `model.safetensors.index.json` lets Hugging Face tools read the
//! bundle like any sharded checkpoint.
//!
//! # Files of tensors
//!
//! A [`TensorFile`] holds tensors that are no part of a model, and texts: what a sequence remembers, for example. It is
//! laid out like a segment, and its last tensor is the hash of all before it.
//!
//! # Bad input
//!
//! Every length, offset, count, shape and path in a file is checked before use. What is wrong comes back as a
//! [`StoreError`] that names the file, the field and the reason.

mod bundle;
mod checkpoint;
mod disk;
mod encoding;
mod error;
mod excerpt;
mod folder;
pub mod gguf;
mod huggingface;
mod import;
mod manifest;
mod mapping;
mod partial;
mod portion;
mod quantize;
pub mod safetensors;
mod segment;
mod stream;
mod tensor_file;
mod text;
mod verify;
mod weight;
mod writer;

pub use checkpoint::{Checkpoint, SourceKind, TensorInfo};
pub use disk::{ReadAt, ReadMethod, probes, reading_rate};
pub use encoding::{Bits, BlockType, Dtype, Encoding, Q4_CHUNK, Quantization};
pub use error::{Fault, StoreError};
pub use import::{ImportOptions, ImportReport, Progress, import};
pub use manifest::{MANIFEST, Manifest, ManifestSegment, ManifestTensor};
pub use portion::{Loaded, Portion, Tensors, Unmapped};
pub use quantize::quantize;
pub use segment::{Segment, SegmentId};
pub use stream::{Order, Stream, StreamConfig, StreamReport};
pub use tensor_file::{FileTensor, NewTensor, NewTensorFile, TensorFile};
pub use text::{GgufVocabulary, TextAssets, TokenizerSource};
pub use verify::{VerifyReport, verify};
pub use weight::Weight;
