//! The steps of JSON Pointers (RFC 6901), whose `/` and `~` are escaped.

/// Escapes a name, so that it is one step of a pointer.
pub(crate) fn escape(name: &str) -> String {
    name.replace('~', "~0").replace('/', "~1")
}

/// Returns the name that a step of a pointer stands for.
pub(crate) fn unescape(step: &str) -> String {
    step.replace("~1", "/").replace("~0", "~")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_one_step_and_come_back() {
        for (name, step) in [("a/b", "a~1b"), ("~1", "~01"), ("~/", "~0~1"), ("", "")] {
            assert_eq!(escape(name), step);
            assert_eq!(unescape(step), name);
        }
    }
}
