//! A whole GGUF file: header, table of tensors, translation to Hugging Face's names and configuration.
#![no_main]

libfuzzer_sys::fuzz_target!(|file: &[u8]| {
    let Ok(model) = firebox_store::gguf::Model::parse(file) else { return };
    assert!(model.config().is_object());
    for tensor in model.tensors() {
        assert_eq!(tensor.encoding.data_bytes(&tensor.shape), Ok(tensor.bytes as usize));
        assert!(tensor.bytes <= file.len() as u64);
    }
});
