//! Splits a template into texts and tags, and removes white space as the tags, `trim_blocks` and `lstrip_blocks`
//! require.

use super::Fault;

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Token {
    Name(String),
    Text(String),
    Integer(i128),
    Float(f64),
    Sign(&'static str),
}

#[derive(Debug)]
pub(super) enum Tag {
    Text(String),
    /// The tag `{{ … }}`.
    Emit(Line),
    /// The tag `{% … %}`.
    Block(Line),
}

/// The tokens of a tag, and the number of the line on which the tag starts.
#[derive(Debug)]
pub(super) struct Line {
    pub(super) number: u32,
    pub(super) tokens: Vec<Token>,
}

/// All operators and punctuation; longer ones come before their prefixes.
const SIGNS: [&str; 27] = [
    "//", "**", "==", "!=", "<=", ">=", "+", "-", "*", "/", "%", "~", "<", ">", "(", ")", "[", "]", "{", "}",
    ",", ":", ".", "|", "=", ";", "!",
];

/// The trimming of the text next to a tag.
#[derive(Clone, Copy, PartialEq, Eq)]
enum After {
    Nothing,
    /// Removes the line break directly after a block, or the indentation before it.
    TakeLineBreak,
    TakeSpace,
}

struct Lexer<'s> {
    source: &'s str,
    at: usize,
    line: u32,
    counted_to: usize,
    after: After,
    /// Whether the current position is known to be the start of a line.
    begins_line: bool,
    tags: Vec<Tag>,
}

/// Splits a whole template.
pub(super) fn tags(source: &str) -> Result<Vec<Tag>, Fault> {
    // Line breaks are normalized, and a line break at the end is dropped, as in Jinja.
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let source = source.strip_suffix('\n').unwrap_or(&source);
    let mut lexer = Lexer {
        source,
        at: 0,
        line: 1,
        counted_to: 0,
        after: After::Nothing,
        begins_line: true,
        tags: Vec::new(),
    };
    while lexer.at < source.len() {
        lexer.text_and_tag()?;
    }
    Ok(lexer.tags)
}

impl<'s> Lexer<'s> {
    fn text_and_tag(&mut self) -> Result<(), Fault> {
        let rest = self.rest();
        let begin = rest.as_bytes().windows(2).position(|at| at[0] == b'{' && b"{%#".contains(&at[1]));
        let Some(begin) = begin else {
            self.text(rest, After::Nothing);
            self.at = self.source.len();
            return Ok(());
        };
        let opening = &rest[begin..begin + 2];
        let modifier = rest[begin + 2..].chars().next().filter(|c| matches!(c, '-' | '+'));
        let before = match (modifier, opening) {
            (Some('-'), _) => After::TakeSpace,
            (None, "{%" | "{#") => After::TakeLineBreak,
            _ => After::Nothing,
        };
        self.text(&rest[..begin], before);
        self.at += begin + 2 + usize::from(modifier.is_some());
        let number = self.line_number();
        match opening {
            "{#" => self.comment().map_err(|fault| fault.at(number)),
            "{{" => {
                let tokens = self.tokens("}}").map_err(|fault| fault.at(number))?;
                self.tags.push(Tag::Emit(Line { number, tokens }));
                Ok(())
            }
            _ => {
                let tokens = self.tokens("%}").map_err(|fault| fault.at(number))?;
                if tokens == [Token::Name("raw".to_owned())] {
                    // The line break after the tag belongs to the raw text.
                    if self.after == After::TakeLineBreak {
                        self.after = After::Nothing;
                    }
                    return self.raw().map_err(|fault| fault.at(number));
                }
                self.tags.push(Tag::Block(Line { number, tokens }));
                Ok(())
            }
        }
    }

    fn rest(&self) -> &'s str {
        &self.source[self.at..]
    }

    fn line_number(&mut self) -> u32 {
        let passed = self.source[self.counted_to..self.at].bytes().filter(|byte| *byte == b'\n').count();
        self.line = self.line.saturating_add(u32::try_from(passed).unwrap_or(u32::MAX));
        self.counted_to = self.at;
        self.line
    }

    /// Adds a text, trimmed as the tags on either side of it require.
    fn text(&mut self, text: &str, before: After) {
        let mut left = text;
        let mut begins_line = self.begins_line && text.is_empty();
        match self.after {
            After::Nothing => {}
            After::TakeLineBreak => {
                left = left.strip_prefix('\n').unwrap_or(left);
            }
            After::TakeSpace => left = left.trim_start(),
        }
        if left.len() < text.len() {
            begins_line = text[..text.len() - left.len()].ends_with('\n');
        } else if self.begins_line {
            begins_line = true;
        }
        match before {
            After::Nothing => {}
            After::TakeSpace => left = left.trim_end(),
            After::TakeLineBreak => {
                let line = left.rfind('\n').map(|at| at + 1).or(begins_line.then_some(0));
                if let Some(line) = line
                    && left[line..].chars().all(char::is_whitespace)
                {
                    left = &left[..line];
                }
            }
        }
        if !left.is_empty() {
            self.tags.push(Tag::Text(left.to_owned()));
        }
        self.begins_line = false;
    }

    fn comment(&mut self) -> Result<(), Fault> {
        let end = self.rest().find("#}").ok_or_else(|| Fault::new("a comment is not closed"))?;
        let modifier = self.rest()[..end].chars().next_back();
        self.at += end + 2;
        self.after = after_block(modifier);
        Ok(())
    }

    /// Reads the text between `{% raw %}` and `{% endraw %}`.
    fn raw(&mut self) -> Result<(), Fault> {
        let rest = self.rest();
        let mut from = 0;
        while let Some(found) = rest[from..].find("{%") {
            let begin = from + found;
            let inner = &rest[begin + 2..];
            let name = inner.strip_prefix(['-', '+']).unwrap_or(inner).trim_start();
            if let Some(behind) = name.strip_prefix("endraw") {
                let behind = behind.trim_start();
                let modifier = behind.chars().next().filter(|c| matches!(c, '-' | '+'));
                if let Some(behind) = behind[usize::from(modifier.is_some())..].strip_prefix("%}") {
                    let before = if inner.starts_with('-') { After::TakeSpace } else { After::TakeLineBreak };
                    self.text(&rest[..begin], before);
                    self.after = after_block(modifier);
                    self.at = self.source.len() - behind.len();
                    return Ok(());
                }
            }
            from = begin + 2;
        }
        Err(Fault::new("a raw block is not closed"))
    }

    /// Reads the tokens of a tag, up to and including its end.
    fn tokens(&mut self, end: &str) -> Result<Vec<Token>, Fault> {
        let mut tokens = Vec::new();
        let mut open_braces = 0_u32;
        loop {
            self.at = self.source.len() - self.rest().trim_start().len();
            let rest = self.rest();
            let modifier = rest.chars().next().filter(|c| matches!(c, '-' | '+'));
            let behind = &rest[usize::from(modifier.is_some())..];
            if open_braces == 0 && behind.starts_with(end) {
                self.at += usize::from(modifier.is_some()) + end.len();
                self.after = match end {
                    "%}" => after_block(modifier),
                    _ if modifier == Some('-') => After::TakeSpace,
                    _ => After::Nothing,
                };
                return Ok(tokens);
            }
            let token = self.token()?;
            match token {
                Token::Sign("{") => open_braces += 1,
                Token::Sign("}") => open_braces = open_braces.saturating_sub(1),
                _ => {}
            }
            tokens.push(token);
        }
    }

    fn token(&mut self) -> Result<Token, Fault> {
        let rest = self.rest();
        let first = rest.chars().next().ok_or_else(|| Fault::new("a tag is not closed"))?;
        let is_word = |c: char| c.is_alphanumeric() || c == '_';
        if matches!(first, '"' | '\'') {
            return self.quoted(first);
        }
        if first.is_ascii_digit() {
            return self.number();
        }
        if is_word(first) {
            let length = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
            self.at += length;
            return Ok(Token::Name(rest[..length].to_owned()));
        }
        let sign = SIGNS.iter().find(|sign| rest.starts_with(**sign));
        let sign = sign.ok_or_else(|| Fault::new(format!("unexpected character {first:?}")))?;
        self.at += sign.len();
        Ok(Token::Sign(sign))
    }

    fn number(&mut self) -> Result<Token, Fault> {
        let rest = self.rest();
        let digits = |text: &str| text.bytes().take_while(|b| b.is_ascii_digit() || *b == b'_').count();
        let mut length = digits(rest);
        let fraction = rest[length..].strip_prefix('.').map_or(0, digits);
        let mut is_float = fraction > 0;
        length += if is_float { 1 + fraction } else { 0 };
        if let Some(exponent) = rest[length..].strip_prefix(['e', 'E']) {
            let signed = exponent.strip_prefix(['+', '-']).unwrap_or(exponent);
            if digits(signed) > 0 {
                length += 1 + exponent.len() - signed.len() + digits(signed);
                is_float = true;
            }
        }
        self.at += length;
        let text = rest[..length].replace('_', "");
        let wrong = || Fault::new("a number is too large");
        match is_float {
            true => Ok(Token::Float(text.parse().map_err(|_| wrong())?)),
            false => Ok(Token::Integer(text.parse().map_err(|_| wrong())?)),
        }
    }

    fn quoted(&mut self, quote: char) -> Result<Token, Fault> {
        let mut text = String::new();
        let mut characters = self.rest().char_indices().skip(1);
        let unended = || Fault::new("a string is not closed");
        loop {
            let (at, character) = characters.next().ok_or_else(unended)?;
            match character {
                end if end == quote => {
                    self.at += at + 1;
                    return Ok(Token::Text(text));
                }
                '\\' => {
                    let (_, escaped) = characters.next().ok_or_else(unended)?;
                    let mut code = |digits: usize| {
                        let code: String = characters.by_ref().take(digits).map(|(_, c)| c).collect();
                        let code = u32::from_str_radix(&code, 16).ok().and_then(char::from_u32);
                        code.ok_or_else(|| Fault::new("an escape in a string is not a valid character"))
                    };
                    match escaped {
                        'n' => text.push('\n'),
                        't' => text.push('\t'),
                        'r' => text.push('\r'),
                        'x' => text.push(code(2)?),
                        'u' => text.push(code(4)?),
                        '\\' | '\'' | '"' => text.push(escaped),
                        '\n' => {}
                        other => text.extend(['\\', other]),
                    }
                }
                other => text.push(other),
            }
        }
    }
}

fn after_block(modifier: Option<char>) -> After {
    match modifier {
        Some('-') => After::TakeSpace,
        Some('+') => After::Nothing,
        _ => After::TakeLineBreak,
    }
}
