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
//! # Exports
//!
//! [`export_safetensors`] and [`GgufPlan`] write what other engines read: names and shapes of Hugging Face, or of llama.cpp.
//! Tensors pass through a bounded buffer, and what is quantized is unpacked, or becomes blocks of the same numbers.
//!
//! # Heads
//!
//! A head is what stands in for the last layers of a model: blocks, final norm and unembedding of its own, or low-rank
//! adapters over them. Heads lie beside their trunk, in a bundle or in a Hugging Face directory, and each names the
//! trunk that it was made for by [hash](trunk_hash()).
//!
//! ```text
//! heads/heads.json                   the table: for each head the generation in use and the one before it
//! heads/code/7/head.json             what the head is, its trunk, its tensors and their hashes
//! heads/code/7/layer-0022.safetensors …  final.safetensors     laid out as the bundle's segments
//! heads/.lock                        held by who changes heads
//! ```
//!
//! A directory with a `head.json` is a head wherever it lies: [`NewHead`] writes one, [`Heads::install`] copies it into
//! a model. It has no name of its own, and no number; these are its model's to give. So a head has one hash everywhere,
//! and the table has the hash of each head that it lists.
//!
//! What a reader may have open is never changed. A change puts new files beside the old ones, makes them durable, and
//! then replaces the table by renaming: a process that ends at any moment leaves the old state or the new one. What it
//! had not finished is cleared away by the next change. All heads of a model begin at the same layer, which the first of
//! them decides.
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

mod block_type;
mod buffer;
mod bundle;
mod checkpoint;
mod disk;
mod encoding;
mod encodings;
mod error;
mod excerpt;
mod expert_stacks;
mod export_report;
pub mod files;
mod folder;
pub mod gguf;
mod heads;
mod huggingface;
mod import;
mod importance;
mod json;
mod manifest;
mod mapping;
mod memory;
mod own_names;
mod packed;
mod partial;
mod parts;
mod progress;
mod quantize;
mod read_at;
mod read_unit;
mod row_reader;
pub mod safetensors;
mod safetensors_export;
mod safetensors_writer;
mod segment;
mod segment_writer;
mod stream;
mod tensor_file;
mod tensor_index;
mod tensor_rows;
mod text;
mod tile;
mod trunk;
mod verify;
mod weight;

pub use buffer::{BufferPool, DetachFlag};
pub use checkpoint::Checkpoint;
pub use disk::{read_rate, sample_units};
pub use encoding::{Bits, BlockType, Dtype, Encoding, Q4_CHUNK, Quantization, TILE_ROWS};
pub use error::{Fault, StoreError};
pub use export_report::ExportReport;
pub use gguf::plan::{GgufDescription, GgufPlan};
pub use gguf::vocabulary::GgufVocabulary;
pub use heads::{
    HEAD, HeadFiles, HeadGeneration, HeadInfo, HeadManifest, HeadRow, HeadTable, Heads, NewHead, is_head_name,
};
pub use import::{ImportOptions, ImportReport, import};
pub use importance::Importance;
pub use manifest::{MANIFEST, Manifest, ManifestSegment, ManifestTensor};
pub use parts::SourceKind;
pub use progress::Progress;
pub use quantize::{encode, is_quantized, quantize};
pub use read_at::{ReadAt, ReadMethod};
pub use read_unit::{LoadedTensors, ReadUnit, Tensors, Unmapped};
pub use safetensors_export::{TokenizerFiles, export_safetensors};
pub use segment::{Segment, SegmentId};
#[cfg(feature = "fuzzing")]
pub use stream::check_stream_events;
pub use stream::{ReadObserver, Requested, Stream, StreamConfig, StreamReport};
pub use tensor_file::{FileTensor, NewTensor, NewTensorFile, TensorFile};
pub use tensor_index::TensorInfo;
pub use text::{TextAssets, TokenizerSource};
pub use trunk::trunk_hash;
pub use verify::{VerifyReport, verify};
pub use weight::Weight;
