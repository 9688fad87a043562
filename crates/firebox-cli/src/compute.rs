//! Options that commands share: the device, and the number format of the KV cache.

use clap::ValueEnum;
use firebox_runtime::KvType;

/// Options that choose the device and its threads.
#[derive(Debug, Clone, clap::Args)]
pub struct DeviceArgs {
    /// Where to compute; `firebox devices` lists what there is
    #[arg(long, value_name = "DEVICE", env = "FIREBOX_DEVICE", default_value = "cpu")]
    pub device: String,
    /// CPU threads to use [default: all]
    #[arg(short, long, value_name = "N", env = "FIREBOX_THREADS", value_parser = clap::value_parser!(u16).range(1..=512))]
    pub threads: Option<u16>,
}

/// Number format of cached keys and values
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum CacheType {
    /// As they were computed
    F32,
    /// Rounded to half precision: half the memory, and less to read at every token
    #[default]
    F16,
    /// Rounded to bytes, with a scale for every head and token: half of that again
    Int8,
}

impl From<CacheType> for KvType {
    fn from(cache: CacheType) -> Self {
        match cache {
            CacheType::F32 => Self::F32,
            CacheType::F16 => Self::F16,
            CacheType::Int8 => Self::Int8,
        }
    }
}
