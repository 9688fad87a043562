//! Firebox from other languages.
