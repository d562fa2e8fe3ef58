//! Determines which session of an agent an event goes to: a fixed one, or one derived from the
//! event.

use crate::SessionId;
use crate::text::excerpt;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fmt;

const MAX_BYTES: usize = 256;

/// A template such as `orders`, `{data.order_id}` or `customer-{data.customer.id}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SessionTemplate {
    text: String,
    pieces: Vec<Piece>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Piece {
    Literal(String),
    Id,
    Topic,
    /// Field names, outermost first.
    Data(Vec<String>),
}

impl SessionTemplate {
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let wrong = |why: &str| {
            let shown = excerpt(text);
            format!("session {shown:?} {why}; write an id, {{data.FIELD}}, {{id}} or {{topic}}")
        };
        if text.len() > MAX_BYTES {
            return Err(wrong("is too long"));
        }
        let mut pieces = Vec::new();
        let mut rest = text;
        while let Some(open) = rest.find('{') {
            let (literal, after) = rest.split_at(open);
            let (name, after) = after[1..].split_once('}').ok_or_else(|| wrong("has a { without its }"))?;
            if !literal.is_empty() {
                pieces.push(Piece::Literal(literal.to_owned()));
            }
            pieces.push(match name {
                "id" => Piece::Id,
                "topic" => Piece::Topic,
                name => match name.strip_prefix("data.") {
                    Some(path) if path.split('.').all(|field| !field.is_empty()) => {
                        Piece::Data(path.split('.').map(str::to_owned).collect())
                    }
                    _ => return Err(wrong(&format!("contains {{{name}}}, which is not a field of events"))),
                },
            });
            rest = after;
        }
        if !rest.is_empty() {
            pieces.push(Piece::Literal(rest.to_owned()));
        }
        if let [Piece::Literal(fixed)] = &pieces[..] {
            SessionId::plain(fixed).map_err(|error| error.to_string())?;
        }
        if pieces.is_empty() {
            return Err(wrong("is empty"));
        }
        Ok(SessionTemplate { text: text.to_owned(), pieces })
    }

    /// Returns whether the session depends on the event's data.
    pub(crate) fn reads_data(&self) -> bool {
        self.pieces.iter().any(|piece| matches!(piece, Piece::Data(_)))
    }

    /// Returns the session id for an event, or the reason why there is none.
    pub(crate) fn render(&self, id: &str, topic: &str, data: Option<&Value>) -> Result<String, String> {
        let mut session = String::new();
        for piece in &self.pieces {
            match piece {
                Piece::Literal(text) => session.push_str(text),
                Piece::Id => session.push_str(id),
                Piece::Topic => session.push_str(topic),
                Piece::Data(path) => match field(data, path) {
                    Some(Value::String(text)) => session.push_str(text),
                    Some(number @ Value::Number(_)) => session.push_str(&number.to_string()),
                    Some(_) => return Err(format!("data.{} is neither text nor a number", path.join("."))),
                    None => return Err(format!("the event has no data.{}", path.join("."))),
                },
            }
        }
        SessionId::plain(&session).map_err(|error| error.to_string())?;
        Ok(session)
    }
}

fn field<'a>(data: Option<&'a Value>, path: &[String]) -> Option<&'a Value> {
    path.iter().try_fold(data?, |value, name| value.get(name))
}

impl fmt::Display for SessionTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl TryFrom<String> for SessionTemplate {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        Self::parse(&text)
    }
}

impl From<SessionTemplate> for String {
    fn from(template: SessionTemplate) -> Self {
        template.text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_template_renders_the_session_from_the_event() {
        let data = json!({"order_id": "o-7", "customer": {"id": 42}, "list": []});
        let render = |template: &str| {
            SessionTemplate::parse(template).expect("valid").render("e1", "order.paid", Some(&data))
        };
        assert_eq!(render("orders").as_deref(), Ok("orders"));
        assert_eq!(render("{data.order_id}").as_deref(), Ok("o-7"));
        assert_eq!(render("{topic}:{data.customer.id}-{id}").as_deref(), Ok("order.paid:42-e1"));
        assert!(render("{data.order}").expect_err("absent").contains("no data.order"));
        assert!(render("{data.list}").expect_err("a list").contains("neither text nor a number"));
        let slash = SessionTemplate::parse("a-{id}").expect("valid").render("b/c", "t", None);
        assert!(slash.expect_err("a slash").contains("a session's id has"));
    }

    #[test]
    fn invalid_templates_are_rejected() {
        for bad in ["", "{data.order_id", "{data.}", "{order}", "a b", "a/b", &"x".repeat(300)] {
            SessionTemplate::parse(bad).expect_err(bad);
        }
    }
}
