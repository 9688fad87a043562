//! Block formats of GGUF: the numbers by which files name them, and the sizes of their blocks.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A block format of GGUF.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[allow(non_camel_case_types, missing_docs)]
pub enum BlockType {
    Q8_0,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_1,
    #[serde(rename = "Q2_K")]
    Q2K,
    #[serde(rename = "Q3_K")]
    Q3K,
    #[serde(rename = "Q4_K")]
    Q4K,
    #[serde(rename = "Q5_K")]
    Q5K,
    #[serde(rename = "Q6_K")]
    Q6K,
    #[serde(rename = "IQ4_NL")]
    IQ4NL,
    #[serde(rename = "IQ4_XS")]
    IQ4XS,
    MXFP4,
    TQ1_0,
    TQ2_0,
    #[serde(rename = "IQ1_S")]
    IQ1S,
    #[serde(rename = "IQ1_M")]
    IQ1M,
    #[serde(rename = "IQ2_XXS")]
    IQ2XXS,
    #[serde(rename = "IQ2_XS")]
    IQ2XS,
    #[serde(rename = "IQ2_S")]
    IQ2S,
    #[serde(rename = "IQ3_XXS")]
    IQ3XXS,
    #[serde(rename = "IQ3_S")]
    IQ3S,
}

impl BlockType {
    /// Every block type.
    pub const ALL: [Self; 23] = [
        Self::Q8_0,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_1,
        Self::Q2K,
        Self::Q3K,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
        Self::IQ4NL,
        Self::IQ4XS,
        Self::MXFP4,
        Self::TQ1_0,
        Self::TQ2_0,
        Self::IQ1S,
        Self::IQ1M,
        Self::IQ2XXS,
        Self::IQ2XS,
        Self::IQ2S,
        Self::IQ3XXS,
        Self::IQ3S,
    ];

    /// The number in GGUF files, weights per block, bytes per block, and the name.
    const fn facts(self) -> (u32, usize, usize, &'static str) {
        match self {
            Self::Q8_0 => (8, 32, 34, "Q8_0"),
            Self::Q4_0 => (2, 32, 18, "Q4_0"),
            Self::Q4_1 => (3, 32, 20, "Q4_1"),
            Self::Q5_0 => (6, 32, 22, "Q5_0"),
            Self::Q5_1 => (7, 32, 24, "Q5_1"),
            Self::Q8_1 => (9, 32, 36, "Q8_1"),
            Self::Q2K => (10, 256, 84, "Q2_K"),
            Self::Q3K => (11, 256, 110, "Q3_K"),
            Self::Q4K => (12, 256, 144, "Q4_K"),
            Self::Q5K => (13, 256, 176, "Q5_K"),
            Self::Q6K => (14, 256, 210, "Q6_K"),
            Self::IQ4NL => (20, 32, 18, "IQ4_NL"),
            Self::IQ4XS => (23, 256, 136, "IQ4_XS"),
            Self::MXFP4 => (39, 32, 17, "MXFP4"),
            Self::TQ1_0 => (34, 256, 54, "TQ1_0"),
            Self::TQ2_0 => (35, 256, 66, "TQ2_0"),
            Self::IQ1S => (19, 256, 50, "IQ1_S"),
            Self::IQ1M => (29, 256, 56, "IQ1_M"),
            Self::IQ2XXS => (16, 256, 66, "IQ2_XXS"),
            Self::IQ2XS => (17, 256, 74, "IQ2_XS"),
            Self::IQ2S => (22, 256, 82, "IQ2_S"),
            Self::IQ3XXS => (18, 256, 98, "IQ3_XXS"),
            Self::IQ3S => (21, 256, 110, "IQ3_S"),
        }
    }

    /// Weights per block.
    pub const fn block_len(self) -> usize {
        self.facts().1
    }

    /// Bytes per block.
    pub const fn block_bytes(self) -> usize {
        self.facts().2
    }

    /// The name in GGUF files.
    pub const fn name(self) -> &'static str {
        self.facts().3
    }

    /// The block type of a number in GGUF files.
    pub fn from_number(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|block| block.facts().0 == number)
    }
}

impl fmt::Display for BlockType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
