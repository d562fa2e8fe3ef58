//! Follows the JSON of an output byte by byte and finds the beginning and end of the values that have to be
//! checked: those that the masks do not enforce, and numbers that may be too large for a double.
//!
//! Invariant: the result does not depend on how the bytes were cut. The masks keep the output in form; for
//! bytes that are not JSON, the result is meaningless, but nothing panics.

use super::opener::Opener;
use super::written_arguments::{ArgumentStep, WrittenArguments};
use crate::constraint::{PathStep, UnenforcedValue};
use crate::json_pointer;

/// The members of a call's object.
const NAME: &str = "name";
const ARGUMENTS: &str = "arguments";
/// A number without an exponent is a finite double if it has no more bytes than this.
pub(super) const MAX_PLAIN_NUMBER_BYTES: usize = 300;

/// The check that a value has to pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Check {
    /// The value validates against the schema of the entry with this number.
    Schema(usize),
    /// The value is a number, and a finite double.
    FiniteNumber,
    /// The argument that stands between tags validates against the schema of the entry. `is_text` is what the markup
    /// says about it.
    Argument { entry: usize, is_text: Option<bool> },
    /// The arguments between their tags validate together against the schema of the entry.
    Arguments(usize),
}

/// The parts of an output that are JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Layout {
    Document,
    Calls,
    DocumentOrCalls,
}

/// A value that has to be checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Found {
    pub check: Check,
    /// The tool whose arguments contain the value.
    pub tool: Option<String>,
    /// Offset of the value's first byte in the output.
    pub start: usize,
    /// The JSON pointer to the value, from the document or from the call's arguments.
    pub pointer: String,
}

/// A found value that is complete.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Complete {
    pub found: Found,
    /// Offset of the byte after the value.
    pub end: usize,
}

/// The current position in an output.
#[derive(Debug)]
pub(super) struct JsonValues {
    opener: Opener,
    /// Whether the text before an answer is followed by a document.
    document_follows: bool,
    region: Region,
    token: Token,
    frames: Vec<Frame>,
    /// Values that have to be checked and are not complete, each with the number of frames around it; outermost
    /// first.
    open: Vec<(Found, usize)>,
    /// Number of bytes so far.
    offset: usize,
}

#[derive(Debug, PartialEq, Eq)]
enum Region {
    /// Only white space so far, so the output may become a document or calls.
    Undecided,
    Document,
    /// Text before a call.
    Text,
    Call {
        name: Option<String>,
    },
    /// In the name of a tool, which begins at this offset.
    Name {
        start: usize,
    },
    /// Between the name of a tool and its arguments.
    BeforeArguments {
        name: String,
    },
    /// In arguments that are an object of their own.
    Arguments {
        name: String,
    },
    /// In arguments that are written one by one.
    Written(WrittenArguments),
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
    /// Creates a reader at the start of an output.
    pub fn new(layout: Layout, opener: &Opener) -> Self {
        let region = match layout {
            Layout::Document => Region::Document,
            Layout::Calls => Region::Text,
            Layout::DocumentOrCalls if !opener.answer.is_empty() => Region::Text,
            Layout::DocumentOrCalls => Region::Undecided,
        };
        JsonValues {
            opener: opener.clone(),
            document_follows: layout == Layout::DocumentOrCalls && !opener.answer.is_empty(),
            region,
            token: Token::Between,
            frames: Vec::new(),
            open: Vec::new(),
            offset: 0,
        }
    }

    /// Returns whether a value that has to be checked is not complete yet.
    pub fn is_within(&self) -> bool {
        !self.open.is_empty()
    }

    /// Takes the bytes of `output` that it has not seen. Returns the values that they complete, inner ones
    /// first, and whether a value to check began.
    pub fn follow(&mut self, output: &[u8], wanted: &[UnenforcedValue]) -> (Vec<Complete>, bool) {
        let (mut complete, mut began) = (Vec::new(), false);
        while self.offset < output.len() {
            self.step(output, wanted, &mut complete, &mut began);
            self.offset += 1;
        }
        (complete, began)
    }

    /// Ends the output, and with it a number at its end.
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
        match &mut self.region {
            Region::After => return,
            Region::Undecided if byte.is_ascii_whitespace() => return,
            Region::Undecided if self.opener.starts(&output[self.offset..]) => self.region = Region::Text,
            Region::Undecided => self.region = Region::Document,
            Region::Name { start } if is_name_byte(byte) => {
                debug_assert!(*start <= self.offset);
                return;
            }
            Region::Name { start } => {
                let name = String::from_utf8_lossy(&output[*start..self.offset]).into_owned();
                self.region = match &self.opener.arguments {
                    Some(tags) => Region::Written(WrittenArguments::new(name, tags)),
                    None => Region::BeforeArguments { name },
                };
            }
            _ => {}
        }
        if let (Region::Written(arguments), Some(tags)) = (&mut self.region, &self.opener.arguments) {
            let step = arguments.step(tags, output, self.offset);
            *began |= self.follow_argument(step, wanted, complete);
            return;
        }
        if let Region::BeforeArguments { name } = &mut self.region {
            if byte != b'{' {
                return;
            }
            let name = std::mem::take(name);
            self.region = Region::Arguments { name };
        }
        if self.region == Region::Text {
            if self.document_follows && output[..=self.offset].ends_with(self.opener.answer.as_bytes()) {
                self.region = Region::Document;
                return;
            }
            let opener = self.opener.text.as_bytes();
            if !opener.is_empty() && output[..=self.offset].ends_with(opener) {
                self.region = match self.opener.names_tool {
                    true => Region::Name { start: self.offset + 1 },
                    false => Region::Call { name: None },
                };
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
            Token::Plain { start } => {
                let is_number = matches!(output[start], b'-' | b'0'..=b'9');
                let has_exponent = matches!(byte, b'e' | b'E');
                if is_number && (has_exponent || self.offset - start == MAX_PLAIN_NUMBER_BYTES) {
                    self.begin_large_number(start);
                    *began = true;
                }
            }
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

    /// Returns the tool and the frames around the value that is being read; `None` outside documents and
    /// arguments.
    fn inside(&self) -> Option<(Option<&String>, &[Frame])> {
        match &self.region {
            Region::Call { name: Some(name) } => match self.frames.split_first() {
                Some((call, inner)) if call.is_at(&PathStep::Property(ARGUMENTS.to_string())) => {
                    Some((Some(name), inner))
                }
                _ => None,
            },
            Region::Arguments { name } => Some((Some(name), &self.frames[..])),
            Region::Document => Some((None, &self.frames[..])),
            _ => None,
        }
    }

    /// Adds the number at `start` to the values to check, because it may not be a finite double when it is
    /// complete.
    fn begin_large_number(&mut self, start: usize) {
        let Some((tool, frames)) = self.inside() else { return };
        let pointer = frames.iter().map(Frame::pointer).collect();
        let found = Found { check: Check::FiniteNumber, tool: tool.cloned(), start, pointer };
        self.open.push((found, self.frames.len()));
    }

    /// Follows arguments that are written one by one. Returns whether a value to check began.
    fn follow_argument(
        &mut self,
        step: ArgumentStep,
        wanted: &[UnenforcedValue],
        complete: &mut Vec<Complete>,
    ) -> bool {
        let Region::Written(arguments) = &self.region else { return false };
        if step == ArgumentStep::Nothing {
            return false;
        }
        let tool = Some(arguments.tool().to_owned());
        let of_tool = wanted.iter().enumerate().filter(|(_, value)| value.tool == tool);
        let known = self.open.len();
        match step {
            ArgumentStep::Nothing => {}
            ArgumentStep::Begun { start } => {
                let whole = of_tool.filter(|(_, value)| value.path.is_empty());
                let checks = whole.map(|(entry, _)| Check::Arguments(entry));
                let found = |check| (Found { check, tool: tool.clone(), start, pointer: String::new() }, 0);
                self.open.extend(checks.map(found));
            }
            ArgumentStep::Value { name, is_text, start } => {
                let frame = Frame::Object { key: Some(name), wants_key: false };
                let is_here =
                    |value: &UnenforcedValue| matches!(&value.path[..], [step] if frame.is_at(step));
                let checks = of_tool.filter(|(_, value)| is_here(value));
                let checks = checks.map(|(entry, _)| Check::Argument { entry, is_text });
                let found = |check| (Found { check, tool: tool.clone(), start, pointer: frame.pointer() }, 1);
                self.open.extend(checks.map(found));
            }
            ArgumentStep::ValueEnded { end } => self.complete_from(1, end, complete),
            ArgumentStep::Ended => {
                self.complete_from(0, self.offset + 1, complete);
                self.region = Region::Text;
            }
        }
        self.open.len() > known
    }

    /// Completes the open values that have at least `depth` frames around them.
    fn complete_from(&mut self, depth: usize, end: usize, complete: &mut Vec<Complete>) {
        let first = self.open.iter().position(|(_, around)| *around >= depth).unwrap_or(self.open.len());
        complete.extend(self.open.drain(first..).map(|(found, _)| Complete { found, end }));
    }

    /// Begins a value. Returns whether it has to be checked.
    fn begin_value(&mut self, wanted: &[UnenforcedValue]) -> bool {
        let Some((tool, frames)) = self.inside() else { return false };
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
        let pointer: String = frames.iter().map(Frame::pointer).collect();
        let depth = self.frames.len();
        let start = self.offset;
        let tool = tool.cloned();
        let found = here.into_iter().map(|entry| {
            let check = Check::Schema(entry);
            (Found { check, tool: tool.clone(), start, pointer: pointer.clone() }, depth)
        });
        self.open.extend(found);
        true
    }

    fn end_value(&mut self, output: &[u8], end: usize, complete: &mut Vec<Complete>) {
        let token = std::mem::replace(&mut self.token, Token::Between);
        let depth = self.frames.len();
        self.complete_from(depth, end, complete);
        if let (Region::Call { name }, [frame], Token::Text { start, .. }) =
            (&mut self.region, &self.frames[..], token)
            && name.is_none()
            && frame.is_at(&PathStep::Property(NAME.to_string()))
        {
            *name = serde_json::from_slice(&output[start..end]).ok();
        }
        if depth == 0 {
            self.region = match self.region {
                Region::Call { .. } | Region::Arguments { .. } => Region::Text,
                _ => Region::After,
            };
        }
    }
}

/// Returns whether the byte may stand in the name of a tool.
fn is_name_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.')
}

impl Frame {
    /// Returns whether the value that is being read in this frame is the one that the step leads to.
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
                format!("/{}", json_pointer::escape(key.as_deref().unwrap_or_default()))
            }
            Frame::Array { index } => format!("/{index}"),
        }
    }
}
