use std::sync::OnceLock;

use burn::module::{
    Content, Devices, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor,
};
use burn::tensor::Device;
use firebox_kernels::linear::{Ready, Weight};

/// What the tensors beside it have been made into for products, once there has been one. Nothing any more where they have
/// become others.
#[derive(Debug, Clone, Default)]
pub(crate) struct Readied(OnceLock<Option<Ready>>);

impl Readied {
    pub fn get_or_make(&self, weight: impl FnOnce() -> Weight) -> Option<&Ready> {
        self.0.get_or_init(|| weight().ready()).as_ref()
    }
}

impl Module for Readied {
    fn visit<V: ModuleVisitor>(&self, _visitor: &mut V) {}

    fn map<M: ModuleMapper>(self, _mapper: &mut M) -> Self {
        Self::default()
    }

    fn to_device(self, _device: &Device) -> Self {
        Self::default()
    }

    fn fork(self, _device: &Device) -> Self {
        Self::default()
    }

    fn collect_devices(&self, devices: Devices) -> Devices {
        devices
    }

    fn materialize(self) -> Self {
        Self::default()
    }

    fn valid(&self) -> Self {
        Self::default()
    }

    fn train(self) -> Self {
        Self::default()
    }
}

impl ModuleDisplayDefault for Readied {
    fn content(&self, _content: Content) -> Option<Content> {
        None
    }
}

impl ModuleDisplay for Readied {}
