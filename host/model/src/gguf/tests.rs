//! Tests of the GGUF container: the accepted values, and the error message for each rejected file.

use std::path::Path;

use super::writer::GgufWriter;
use super::*;

fn parsed(file: &[u8]) -> Result<GgufFile, ModelError> {
    GgufFile::parse(Path::new("test.gguf"), file)
}

fn refusal(file: &[u8]) -> String {
    parsed(file).expect_err("the file must be rejected").to_string()
}

fn one_tensor() -> GgufWriter {
    GgufWriter::default().weights("w", &[2, 3])
}

#[test]
fn reads_every_value_type_and_the_tensor_directory() {
    let file = one_tensor()
        .raw("u8", 0, vec![200])
        .raw("i8", 1, vec![0xff])
        .raw("u16", 2, 60000u16.to_le_bytes().to_vec())
        .raw("i16", 3, (-3i16).to_le_bytes().to_vec())
        .raw("i32", 5, 7i32.to_le_bytes().to_vec())
        .raw("u64", 10, u64::MAX.to_le_bytes().to_vec())
        .raw("i64", 11, (-9i64).to_le_bytes().to_vec())
        .raw("f64", 12, 0.25f64.to_le_bytes().to_vec())
        .float("f32", 1.5)
        .boolean("bool", true)
        .string("text", "naïve")
        .strings("texts", &["a".to_owned(), "bc".to_owned()])
        .integers("numbers", &[1, -2])
        .build();
    let gguf = parsed(&file).unwrap();
    assert_eq!(gguf.unsigned("u8").unwrap(), Some(200));
    assert_eq!(gguf.unsigned("u64").unwrap(), Some(u64::MAX));
    assert_eq!(gguf.unsigned("i32").unwrap(), Some(7));
    assert_eq!(gguf.float("i16").unwrap(), Some(-3.0));
    assert_eq!(gguf.float("f64").unwrap(), Some(0.25));
    assert_eq!(gguf.float("f32").unwrap(), Some(1.5));
    assert_eq!(gguf.boolean("bool").unwrap(), Some(true));
    assert_eq!(gguf.string("text").unwrap(), Some("naïve"));
    assert_eq!(gguf.unsigned("absent").unwrap(), None);
    let texts: Vec<&str> = gguf.array("texts").unwrap().unwrap().strings(&file).unwrap().collect();
    assert_eq!(texts, ["a", "bc"]);
    let numbers: Vec<Value> = gguf.array("numbers").unwrap().unwrap().scalars(&file).unwrap().collect();
    assert_eq!(numbers, [Value::Signed(1), Value::Signed(-2)]);
    let tensor = &gguf.tensors()[0];
    assert_eq!((tensor.name.as_str(), tensor.dtype, tensor.shape.as_slice()), ("w", DType::F32, &[2, 3][..]));
    assert_eq!((tensor.bytes.len(), tensor.bytes.start % 32), (24, 0));
    assert_eq!(parsed(&one_tensor().build_with(2, 1, 0)).unwrap().tensors().len(), 1);
}

#[test]
fn a_key_of_the_wrong_type_is_an_error() {
    let gguf = parsed(&GgufWriter::default().string("k", "x").raw("neg", 5, vec![0xff; 4]).build()).unwrap();
    for error in
        [gguf.unsigned("k").unwrap_err(), gguf.unsigned("neg").unwrap_err(), gguf.array("k").unwrap_err()]
    {
        assert!(matches!(error, ModelError::Config { .. }), "{error}");
    }
}

#[test]
fn rejects_other_files_versions_and_byte_orders() {
    let version = |version: u32| one_tensor().build_with(version, 1, 0);
    for (file, words) in [
        (b"".to_vec(), "magic"),
        (b"PK\x03\x04 a zip".to_vec(), "GGUF"),
        (version(1), "version 1"),
        (version(4), "version 4"),
        (version(3u32.swap_bytes()), "big-endian"),
    ] {
        let message = refusal(&file);
        assert!(message.contains(words) && message.contains("test.gguf"), "{message}");
    }
}

#[test]
fn rejects_counts_and_lengths_beyond_the_file() {
    let huge = 1u64 << 62;
    let lying_array = |code: u32, count: u64| {
        let mut bytes = code.to_le_bytes().to_vec();
        bytes.extend(count.to_le_bytes());
        GgufWriter::default().raw("k", 9, bytes).build()
    };
    for file in [
        one_tensor().build_with(3, huge, 0),
        one_tensor().build_with(3, 1, huge),
        one_tensor().build_with(3, u64::MAX, u64::MAX),
        GgufWriter::default().raw("k", 8, u64::MAX.to_le_bytes().to_vec()).build(),
        lying_array(4, huge),
        lying_array(8, u64::MAX),
        lying_array(9, huge),
        lying_array(12, u64::MAX / 8 + 1),
        lying_array(99, 1),
    ] {
        assert!(matches!(parsed(&file), Err(ModelError::Malformed { .. })));
    }
    let nested = (0..50_000)
        .flat_map(|_| [9u32.to_le_bytes().to_vec(), 1u64.to_le_bytes().to_vec()].concat())
        .collect();
    assert!(refusal(&GgufWriter::default().raw("k", 9, nested).build()).contains("nests"));
}

#[test]
fn rejects_invalid_tensors_by_name() {
    let tensor = |dimensions: &[u64], code: u32| {
        GgufWriter::default().tensor("blk.0.odd", dimensions, code, vec![0; 64]).build()
    };
    for (file, words) in [
        (tensor(&[4, 4, 1, 1, 1], 0), "5 dimensions"),
        (tensor(&[], 0), "0 dimensions"),
        (tensor(&[0, 4], 0), "dimension of 0"),
        (tensor(&[4], 9), "Q8_1"),
        (tensor(&[4], 777), "unknown (777)"),
        (tensor(&[33], 2), "cannot hold"),
        (tensor(&[u64::MAX / 2, 4], 0), "cannot hold"),
        (tensor(&[1 << 40], 0), "past the end"),
        (one_tensor().weights("w", &[1]).build(), "twice"),
    ] {
        let error = parsed(&file).unwrap_err();
        assert!(matches!(error, ModelError::Tensor { .. }), "{error}");
        assert!(error.to_string().contains(words), "{error}");
    }
}

#[test]
fn rejects_misaligned_out_of_range_and_overflowing_offsets() {
    let file = one_tensor().build();
    let at = file.windows(8).position(|bytes| bytes == [2, 0, 0, 0, 0, 0, 0, 0]).unwrap() + 8 + 4;
    for (offset, words) in [(1u64, "multiple"), (1 << 40, "past the end"), (u64::MAX - 31, "past the end")] {
        let mut file = file.clone();
        file[at..at + 8].copy_from_slice(&offset.to_le_bytes());
        let message = refusal(&file);
        assert!(message.contains(words) && message.contains("`w`"), "{message}");
    }
}

#[test]
fn rejects_invalid_alignments_and_duplicate_keys() {
    for alignment in [0, 3, 1 << 21] {
        let message = refusal(&one_tensor().unsigned("general.alignment", alignment).build());
        assert!(message.contains("general.alignment"), "{message}");
    }
    let file = GgufWriter::default().boolean("aa", true).boolean("ab", true).build();
    let mut twice = file.clone();
    let second = file.windows(2).position(|bytes| bytes == b"ab").unwrap();
    twice[second + 1] = b'a';
    assert!(refusal(&twice).contains("`aa` appears twice"));
}

#[test]
fn rejects_a_file_truncated_at_any_length() {
    let file = one_tensor().string("key", "value").strings("list", &["x".to_owned()]).build();
    for length in 0..file.len() {
        assert!(parsed(&file[..length]).is_err(), "cut to {length} of {} bytes", file.len());
    }
}
