//! The index of a checkpoint's tensors by name, and the mapped files that hold them.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use crate::encoding::Encoding;
use crate::error::StoreError;
use crate::excerpt::Excerpt;
use crate::mapping::Mapping;
use crate::segment::SegmentId;
use crate::weight::Weight;

/// One tensor of a checkpoint or of a head.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// The Hugging Face name.
    pub name: String,
    /// The logical shape, outermost dimension first.
    pub shape: Vec<usize>,
    /// The number format of its elements.
    pub encoding: Encoding,
    /// The segment it belongs to.
    pub segment: SegmentId,
    /// Bytes on disk, scales included.
    pub bytes: u64,
}

/// A range of one of the index's files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) file: usize,
    pub(crate) start: usize,
    pub(crate) len: usize,
}

/// The location of a tensor's data and scales.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) data: Span,
    pub(crate) scales: Option<Span>,
}

impl Place {
    pub(crate) fn spans(&self) -> impl Iterator<Item = Span> {
        [Some(self.data), self.scales].into_iter().flatten()
    }
}

/// Tensors in the order of a forward pass, found by name. Their spans have been checked against the lengths of the files.
#[derive(Debug)]
pub(crate) struct TensorIndex {
    path: PathBuf,
    files: Vec<Mapping>,
    tensors: Vec<(TensorInfo, Place)>,
    index: HashMap<String, usize>,
}

impl TensorIndex {
    pub(crate) fn new(
        path: PathBuf,
        files: Vec<Mapping>,
        mut tensors: Vec<(TensorInfo, Place)>,
    ) -> Result<Self, StoreError> {
        tensors.sort_by(|(a, _), (b, _)| (a.segment, &a.name).cmp(&(b.segment, &b.name)));
        if let Some(pair) = tensors.windows(2).find(|pair| pair[0].0.name == pair[1].0.name) {
            let both = pair.iter().map(|(_, place)| files[place.data.file].path().display().to_string());
            return Err(StoreError::Malformed {
                file: path,
                field: format!("tensor {:?}", Excerpt(&pair[0].0.name)),
                reason: format!("stored twice: {}", both.collect::<Vec<_>>().join(" and ")),
            });
        }
        let index = tensors.iter().enumerate().map(|(at, (info, _))| (info.name.clone(), at)).collect();
        Ok(Self { path, files, tensors, index })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn files(&self) -> &[Mapping] {
        &self.files
    }

    pub(crate) fn file(&self, span: Span) -> &Mapping {
        &self.files[span.file]
    }

    pub(crate) fn tensors(&self) -> &[(TensorInfo, Place)] {
        &self.tensors
    }

    pub(crate) fn infos(&self) -> impl Iterator<Item = &TensorInfo> {
        self.tensors.iter().map(|(info, _)| info)
    }

    pub(crate) fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.index.get(name).map(|&at| &self.tensors[at].0)
    }

    pub(crate) fn entry(&self, name: &str) -> Result<&(TensorInfo, Place), StoreError> {
        self.index
            .get(name)
            .map(|&at| &self.tensors[at])
            .ok_or_else(|| StoreError::MissingTensor { model: self.path.clone(), tensor: name.to_owned() })
    }

    /// A tensor's bytes: a slice of the mapping, read from disk when touched.
    pub(crate) fn weight(&self, name: &str) -> Result<Weight, StoreError> {
        let (info, place) = self.entry(name)?;
        let (data, mut mapped) =
            self.file(place.data).slice(place.data.start, place.data.len, info.encoding.align());
        let scales = place.scales.map(|span| {
            let (scales, in_place) = self.file(span).slice(span.start, span.len, 2);
            mapped &= in_place;
            scales
        });
        Ok(Weight {
            name: info.name.clone(),
            shape: info.shape.clone(),
            encoding: info.encoding,
            data,
            scales,
            mapped,
        })
    }
}
