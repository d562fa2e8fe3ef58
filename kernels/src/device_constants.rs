//! Constants that kernels and their launches share. Each one is defined once, in the CUDA sources, and read from there when
//! this crate is compiled.
//!
//! Invariant: a name that is not defined, or whose value is not a literal, is a compile error.

/// Reads a constant from a file of the CUDA sources, or one of a struct in it.
macro_rules! device_constant {
    ($file:literal, $name:literal) => {
        $crate::device_constants::value(
            include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/cuda/", $file)),
            "",
            $name,
        )
    };
    ($file:literal, $struct:literal, $name:literal) => {
        $crate::device_constants::value(
            include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/cuda/", $file)),
            concat!("\nstruct ", $struct, " "),
            $name,
        )
    };
}
pub(crate) use device_constant;

/// Returns the literal in the first definition ` NAME = literal` that follows the text `after` in a source.
pub(crate) const fn value(source: &str, after: &str, name: &str) -> u32 {
    let (text, after, name) = (source.as_bytes(), after.as_bytes(), name.as_bytes());
    let mut at = 0;
    while !starts_with(text, at, after) {
        assert!(at < text.len(), "the CUDA source does not define the struct of the constant");
        at += 1;
    }
    let is_member = !after.is_empty();
    at += if is_member { after.len() } else { 1 };
    while at + name.len() < text.len() && !(is_member && starts_with(text, at, b"\n}")) {
        if text[at - 1] == b' ' && starts_with(text, at, name) && starts_with(text, at + name.len(), b" = ") {
            return literal(text, at + name.len() + 3);
        }
        at += 1;
    }
    panic!("the CUDA source does not define the constant");
}

const fn starts_with(text: &[u8], at: usize, start: &[u8]) -> bool {
    let mut index = 0;
    while index < start.len() {
        if at + index >= text.len() || text[at + index] != start[index] {
            return false;
        }
        index += 1;
    }
    true
}

/// Returns the decimal or hexadecimal literal at `at`, which may be marked as unsigned.
const fn literal(text: &[u8], mut at: usize) -> u32 {
    let radix = if starts_with(text, at, b"0x") { 16 } else { 10 };
    at += if radix == 16 { 2 } else { 0 };
    let (start, mut value) = (at, 0u32);
    while let Some(digit) = (text[at] as char).to_digit(radix) {
        value = value * radix + digit;
        at += 1;
    }
    at += (text[at] == b'u') as usize;
    assert!(at > start && matches!(text[at], b';' | b',' | b' '), "the constant's value is not a literal");
    value
}

#[cfg(test)]
mod tests {
    use super::value;

    const SOURCE: &str = "constexpr int WIDE = 12;\nenum Kind { A_B = 1, C = 0xffu };\nconstexpr int SUM = WIDE + 1;\n\
                          struct Wide {\n    static constexpr int BYTES = 3;\n};\nstruct Wider {\n    static constexpr int BYTES = 4;\n};\n";

    #[test]
    fn literals_are_read_from_definitions() {
        let global = |name| value(SOURCE, "", name);
        assert_eq!((global("WIDE"), global("A_B"), global("C")), (12, 1, 255));
    }

    #[test]
    fn a_constant_of_a_struct_is_read_behind_its_name() {
        let bytes = |name| value(SOURCE, name, "BYTES");
        assert_eq!((bytes("\nstruct Wide {"), bytes("\nstruct Wider {")), (3, 4));
    }

    #[test]
    #[should_panic(expected = "does not define the struct")]
    fn an_unknown_struct_is_not_found() {
        value(SOURCE, "\nstruct Narrow {", "BYTES");
    }

    #[test]
    #[should_panic(expected = "does not define the constant")]
    fn a_part_of_a_name_is_not_found() {
        value(SOURCE, "", "B");
    }

    #[test]
    #[should_panic(expected = "does not define the constant")]
    fn a_constant_of_the_next_struct_is_not_found() {
        value("x\nstruct A {\n};\nstruct B {\n    int BYTES = 4;\n};\n", "\nstruct A {", "BYTES");
    }

    #[test]
    #[should_panic(expected = "not a literal")]
    fn an_expression_is_rejected() {
        value(SOURCE, "", "SUM");
    }
}
