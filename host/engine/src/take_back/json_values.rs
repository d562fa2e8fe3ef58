//! Follows the JSON of an output byte by byte and says where the values begin and end that have to be checked.
//!
//! Invariant: it says the same however the bytes were cut. The masks keep the output in form; of bytes that are not JSON
//! it says nothing sensible and does not panic.

use crate::constraint::{PathStep, UnenforcedValue};

/// The members of a call's object.
const NAME: &str = "name";
const ARGUMENTS: &str = "arguments";

/// A value that has to be checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Found {
    /// The number of its entry.
    pub entry: usize,
    /// Its first byte in the output.
    pub start: usize,
    /// The JSON pointer to it, from the document or from the call's arguments.
    pub place: String,
}

/// One that is complete.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Complete {
    pub found: Found,
    /// The byte after its last one.
    pub end: usize,
}

/// Where an output stands.
#[derive(Debug)]
pub(super) struct JsonValues {
    /// The text before a call's object.
    opener: String,
    region: Region,
    token: Token,
    frames: Vec<Frame>,
    /// Values that have to be checked and are not complete, with how many frames are around them; outermost first.
    open: Vec<(Found, usize)>,
    /// Bytes so far.
    offset: usize,
}

#[derive(Debug, PartialEq, Eq)]
enum Region {
    /// Nothing but white space so far, and it may become either.
    Undecided,
    Document,
    /// Before a call.
    Text,
    Call {
        name: Option<String>,
    },
    /// The document is complete.
    After,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Token {
    Between,
    Text {
        start: usize,
        escaped: bool,
        is_key: bool,
    },
    /// A number or a literal.
    Plain {
        start: usize,
    },
}

#[derive(Debug)]
enum Frame {
    Object { key: Option<String>, wants_key: bool },
    Array { index: usize },
}

impl JsonValues {
    pub fn new(wanted: &[UnenforcedValue], opener: &str) -> Self {
        let documents = wanted.iter().any(|value| value.tool.is_none());
        let calls = wanted.iter().any(|value| value.tool.is_some());
        let region = match (documents, calls) {
            (true, true) => Region::Undecided,
            (true, false) => Region::Document,
            _ => Region::Text,
        };
        JsonValues {
            opener: opener.to_string(),
            region,
            token: Token::Between,
            frames: Vec::new(),
            open: Vec::new(),
            offset: 0,
        }
    }

    /// Whether a value is not complete that has to be checked.
    pub fn is_within(&self) -> bool {
        !self.open.is_empty()
    }

    /// Takes the bytes of `output` that it has not seen. Gives the values that they complete, inner ones first, and
    /// whether one began.
    pub fn follow(&mut self, output: &[u8], wanted: &[UnenforcedValue]) -> (Vec<Complete>, bool) {
        let (mut complete, mut began) = (Vec::new(), false);
        while self.offset < output.len() {
            self.step(output, wanted, &mut complete, &mut began);
            self.offset += 1;
        }
        (complete, began)
    }

    /// The output has ended: so has a number at its end.
    pub fn finish(&mut self, output: &[u8]) -> Vec<Complete> {
        let mut complete = Vec::new();
        if let Token::Plain { .. } = self.token {
            self.end_value(output, self.offset, &mut complete);
        }
        complete
    }

    fn step(
        &mut self,
        output: &[u8],
        wanted: &[UnenforcedValue],
        complete: &mut Vec<Complete>,
        began: &mut bool,
    ) {
        let byte = output[self.offset];
        match self.region {
            Region::After => return,
            Region::Undecided if byte.is_ascii_whitespace() => return,
            Region::Undecided if self.opener.as_bytes().first() == Some(&byte) => self.region = Region::Text,
            Region::Undecided => self.region = Region::Document,
            _ => {}
        }
        if self.region == Region::Text {
            if output[..=self.offset].ends_with(self.opener.as_bytes()) {
                self.region = Region::Call { name: None };
            }
            return;
        }
        match self.token {
            Token::Text { start, escaped: true, is_key } => {
                self.token = Token::Text { start, escaped: false, is_key };
            }
            Token::Text { start, escaped: false, is_key } => match byte {
                b'\\' => self.token = Token::Text { start, escaped: true, is_key },
                b'"' if is_key => self.end_key(&output[start..=self.offset]),
                b'"' => self.end_value(output, self.offset + 1, complete),
                _ => {}
            },
            Token::Plain { .. } if matches!(byte, b',' | b']' | b'}') || byte.is_ascii_whitespace() => {
                self.end_value(output, self.offset, complete);
                self.between(output, byte, wanted, complete, began);
            }
            Token::Plain { .. } => {}
            Token::Between => self.between(output, byte, wanted, complete, began),
        }
    }

    fn between(
        &mut self,
        output: &[u8],
        byte: u8,
        wanted: &[UnenforcedValue],
        complete: &mut Vec<Complete>,
        began: &mut bool,
    ) {
        let at = self.offset;
        match byte {
            b' ' | b'\t' | b'\n' | b'\r' => {}
            b'"' if matches!(self.frames.last(), Some(Frame::Object { wants_key: true, .. })) => {
                self.token = Token::Text { start: at, escaped: false, is_key: true };
            }
            b':' => {
                if let Some(Frame::Object { wants_key, .. }) = self.frames.last_mut() {
                    *wants_key = false;
                }
            }
            b',' => match self.frames.last_mut() {
                Some(Frame::Object { key, wants_key }) => (*key, *wants_key) = (None, true),
                Some(Frame::Array { index }) => *index += 1,
                None => {}
            },
            b'}' | b']' => {
                self.frames.pop();
                self.end_value(output, at + 1, complete);
            }
            _ => {
                *began |= self.begin_value(wanted);
                match byte {
                    b'{' => self.frames.push(Frame::Object { key: None, wants_key: true }),
                    b'[' => self.frames.push(Frame::Array { index: 0 }),
                    b'"' => self.token = Token::Text { start: at, escaped: false, is_key: false },
                    _ => self.token = Token::Plain { start: at },
                }
            }
        }
    }

    fn end_key(&mut self, quoted: &[u8]) {
        self.token = Token::Between;
        if let Some(Frame::Object { key, .. }) = self.frames.last_mut() {
            *key = serde_json::from_slice(quoted).ok();
        }
    }

    /// Whether it is one that has to be checked.
    fn begin_value(&mut self, wanted: &[UnenforcedValue]) -> bool {
        let (tool, frames) = match &self.region {
            Region::Call { name: Some(name) } => match self.frames.split_first() {
                Some((call, inner)) if call.is_at(&PathStep::Property(ARGUMENTS.to_string())) => {
                    (Some(name), inner)
                }
                _ => return false,
            },
            Region::Document => (None, &self.frames[..]),
            _ => return false,
        };
        let is_here = |value: &UnenforcedValue| {
            value.tool.as_ref() == tool
                && value.path.len() == frames.len()
                && value.path.iter().zip(frames).all(|(step, frame)| frame.is_at(step))
        };
        let here: Vec<usize> =
            wanted.iter().enumerate().filter(|(_, value)| is_here(value)).map(|(entry, _)| entry).collect();
        if here.is_empty() {
            return false;
        }
        let place: String = frames.iter().map(Frame::pointer).collect();
        let depth = self.frames.len();
        let start = self.offset;
        let found = here.into_iter().map(|entry| (Found { entry, start, place: place.clone() }, depth));
        self.open.extend(found);
        true
    }

    fn end_value(&mut self, output: &[u8], end: usize, complete: &mut Vec<Complete>) {
        let token = std::mem::replace(&mut self.token, Token::Between);
        let depth = self.frames.len();
        let first = self.open.iter().position(|(_, around)| *around >= depth).unwrap_or(self.open.len());
        complete.extend(self.open.drain(first..).map(|(found, _)| Complete { found, end }));
        if let (Region::Call { name }, [frame], Token::Text { start, .. }) =
            (&mut self.region, &self.frames[..], token)
            && name.is_none()
            && frame.is_at(&PathStep::Property(NAME.to_string()))
        {
            *name = serde_json::from_slice(&output[start..end]).ok();
        }
        if depth == 0 {
            self.region = match self.region {
                Region::Call { .. } => Region::Text,
                _ => Region::After,
            };
        }
    }
}

impl Frame {
    /// Whether the value that is being read in it is the one that the step leads to.
    fn is_at(&self, step: &PathStep) -> bool {
        match (self, step) {
            (Frame::Object { key: Some(key), .. }, PathStep::Property(name)) => key == name,
            (Frame::Object { key: Some(_), .. }, PathStep::AnyProperty) => true,
            (Frame::Array { index }, PathStep::Item(item)) => index == item,
            (Frame::Array { .. }, PathStep::AnyItem) => true,
            _ => false,
        }
    }

    fn pointer(&self) -> String {
        match self {
            Frame::Object { key, .. } => {
                format!("/{}", key.as_deref().unwrap_or_default().replace('~', "~0").replace('/', "~1"))
            }
            Frame::Array { index } => format!("/{index}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    const OPENER: &str = "<tool_call>";

    fn wanted(tool: Option<&str>, path: &[PathStep]) -> UnenforcedValue {
        UnenforcedValue { tool: tool.map(str::to_owned), path: path.to_vec(), schema: Value::Bool(true) }
    }

    fn property(name: &str) -> PathStep {
        PathStep::Property(name.to_string())
    }

    /// The texts of the values that were complete, with their entry and place, in their order.
    fn values(wanted: &[UnenforcedValue], output: &str, piece: usize) -> Vec<(usize, String, String)> {
        let mut following = JsonValues::new(wanted, OPENER);
        let mut complete = Vec::new();
        let ends = (0..output.len()).step_by(piece).skip(1).chain([output.len()]);
        for end in ends {
            complete.extend(following.follow(&output.as_bytes()[..end], wanted).0);
        }
        complete.extend(following.finish(output.as_bytes()));
        assert!(!following.is_within());
        let shown = |Complete { found, end }: Complete| {
            (found.entry, found.place, output[found.start..end].to_string())
        };
        complete.into_iter().map(shown).collect()
    }

    fn check(wanted: &[UnenforcedValue], output: &str, expected: &[(usize, &str, &str)]) {
        for piece in 1..=output.len() {
            let found = values(wanted, output, piece);
            let found: Vec<_> =
                found.iter().map(|(e, place, text)| (*e, place.as_str(), text.as_str())).collect();
            assert_eq!(found, expected, "{output} in pieces of {piece}");
        }
    }

    #[test]
    fn values_of_a_document_are_found_by_their_path() {
        let document = r#" {"a": [1, {"b": "x,\"]"}, [ ]], "c/d" : {"e":-2.5e3 }, "f": true}"#;
        for (path, expected) in [
            (vec![property("f")], vec![("/f", "true")]),
            (vec![property("c/d"), property("e")], vec![("/c~1d/e", "-2.5e3")]),
            (vec![property("a"), PathStep::Item(1), property("b")], vec![("/a/1/b", r#""x,\"]""#)]),
            (
                vec![property("a"), PathStep::AnyItem],
                vec![("/a/0", "1"), ("/a/1", r#"{"b": "x,\"]"}"#), ("/a/2", "[ ]")],
            ),
            (vec![property("missing")], vec![]),
        ] {
            let expected: Vec<_> = expected.into_iter().map(|(place, text)| (0, place, text)).collect();
            check(&[wanted(None, &path)], document, &expected);
        }
        let every = [wanted(None, &[]), wanted(None, &[PathStep::AnyProperty])];
        check(
            &every,
            r#"{"a":1,"b":"}"}"#,
            &[(1, "/a", "1"), (1, "/b", "\"}\""), (0, "", r#"{"a":1,"b":"}"}"#)],
        );
    }

    #[test]
    fn a_number_at_the_end_of_the_output_is_complete() {
        check(&[wanted(None, &[])], "-12.5", &[(0, "", "-12.5")]);
        check(&[wanted(None, &[])], "\"a\" ", &[(0, "", "\"a\"")]);
    }

    #[test]
    fn arguments_are_those_of_the_named_tool() {
        let wanted = [wanted(Some("x"), &[property("a")]), wanted(Some("y"), &[])];
        let output = concat!(
            "Let me {\"a\": 1} see <tool_call>\n{\"name\": \"x\", \"arguments\": {\"a\": [\"<tool_call>\"]}}\n",
            "</tool_call>\n<tool_call>{\"name\":\"y\",\"arguments\":{\"a\":2}}</tool_call>",
        );
        check(&wanted, output, &[(0, "/a", "[\"<tool_call>\"]"), (1, "", "{\"a\":2}")]);
    }

    #[test]
    fn an_output_is_a_document_or_calls() {
        let both = [wanted(None, &[property("a")]), wanted(Some("x"), &[property("a")])];
        check(&both, r#" {"a": 1, "b": "<tool_call>"}"#, &[(0, "/a", "1")]);
        check(&both, r#"<tool_call>{"name": "x", "arguments": {"a": 2}}"#, &[(1, "/a", "2")]);
        check(&both, r#"<tool_call>{"name": "z", "arguments": {"a": 2}}"#, &[]);
    }
}
