//! The heads of a model on disk: their files, the table that lists them, and changes to both.

mod head;
mod installed;
mod new_head;
mod steps;
mod table;

pub use head::{HEAD, HeadFiles, HeadManifest};
pub(crate) use installed::installed_names;
pub use installed::{HeadInfo, Heads};
pub use new_head::NewHead;
pub use table::{HeadGeneration, HeadRow, HeadTable, is_head_name};
