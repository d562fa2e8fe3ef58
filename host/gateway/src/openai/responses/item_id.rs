//! Ids of items, which say which response an item belongs to.
//!
//! An id consists of a prefix for its type, the digits of its response's id, and its position, so that the same item has
//! the same id whenever and wherever it is derived from the stored answer.

/// Number of hexadecimal digits of a response's id.
const DIGITS: usize = 32;
const RESPONSE: &str = "resp_";

/// A position in the input or the output of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Position {
    Input(usize),
    Output(usize),
}

/// Returns the id of an item of a response.
pub(super) fn of(prefix: &str, response: &str, position: Position) -> String {
    let digits = response.strip_prefix(RESPONSE).unwrap_or(response);
    match position {
        Position::Input(index) => format!("{prefix}_{digits}i{index:04x}"),
        Position::Output(index) => format!("{prefix}_{digits}o{index:04x}"),
    }
}

/// Returns the response that an item belongs to, and its position there.
pub(super) fn read(id: &str) -> Option<(String, Position)> {
    let (_, rest) = id.split_once('_')?;
    let (digits, position) = rest.split_at_checked(DIGITS)?;
    let is_id = digits.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    let index = usize::from_str_radix(position.get(1..)?, 16).ok()?;
    let position = match position.as_bytes().first()? {
        b'i' => Position::Input(index),
        b'o' => Position::Output(index),
        _ => return None,
    };
    is_id.then(|| (format!("{RESPONSE}{digits}"), position))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_names_its_response_and_position() {
        let response = skep_runtime::response_id();
        for position in [Position::Input(0), Position::Output(70_000)] {
            assert_eq!(read(&of("msg", &response, position)), Some((response.clone(), position)));
        }
        for id in ["msg_1", "", "msg_", "msg_é", "resp_0123456789abcdef0123456789abcdefx0001"] {
            assert_eq!(read(id), None, "{id}");
        }
    }
}
