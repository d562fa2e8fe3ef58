//! A scanner that finds the end of a JSON object while it arrives, without parsing it.
//!
//! Invariant: braces and brackets within strings do not count.

#[derive(Clone, Debug, Default)]
pub(super) struct JsonScan {
    depth: usize,
    string: StringState,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum StringState {
    #[default]
    Outside,
    Inside,
    Escape,
}

impl JsonScan {
    /// Creates a scan of an object whose opening brace was seen.
    pub(super) fn opened() -> Self {
        JsonScan { depth: 1, ..JsonScan::default() }
    }

    /// Takes the next character. Returns whether it closed the outermost object.
    pub(super) fn push(&mut self, c: char) -> bool {
        match (self.string, c) {
            (StringState::Outside, '"') => self.string = StringState::Inside,
            (StringState::Outside, '{' | '[') => self.depth += 1,
            (StringState::Outside, '}' | ']') => {
                self.depth = self.depth.saturating_sub(1);
                return self.depth == 0;
            }
            (StringState::Outside, _) => {}
            (StringState::Inside, '\\') => self.string = StringState::Escape,
            (StringState::Inside, '"') => self.string = StringState::Outside,
            (StringState::Inside, _) => {}
            (StringState::Escape, _) => self.string = StringState::Inside,
        }
        false
    }

    /// Takes the next character of a string whose opening quote was seen. Returns whether it closed the string.
    pub(super) fn push_in_string(&mut self, c: char) -> bool {
        if self.string == StringState::Outside {
            self.string = StringState::Inside;
        }
        self.push(c);
        self.string == StringState::Outside
    }

    pub(super) fn in_string(&self) -> bool {
        self.string != StringState::Outside
    }
}
