//! Text that a model generates and that may contain tool calls.

pub(crate) const WORDS: &[&str] = &[
    "<tool_call>",
    "</tool_call>",
    "<tool_",
    "call>",
    "{\"name\": \"",
    "\", \"arguments\": ",
    "{}",
    "}}",
    "\n",
    "\\\"",
    "\\u",
    "\\ud83d\\ude00",
    "\"name\"",
    "\"arguments\"",
    ":",
    ",",
    "[",
    "]",
    "null",
    "\"{\\\"a\\\": 1}\"",
];

/// Parses the text. The first byte says how the text is split into chunks.
pub(crate) fn text(input: &[u8]) {
    let Some((cut, text)) = input.split_first() else { return };
    let text = String::from_utf8_lossy(text);
    skep_engine::chat::fuzz::read_tool_calls(&text, usize::from(cut >> 1), cut & 1 == 1);
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    [
        "Let me see. <tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\", \"days\": [1, 2.5e3]}}\n</tool_call>",
        "<tool_call>{\"name\":\"a\",\"arguments\":{}}</tool_call><tool_call>{\"name\":\"b\",\"arguments\":{\"x\":\"</tool_call>\"}}</tool_call> ",
        "<tool_call>{\"arguments\": {\"a\": 1}, \"name\": \"f\"}</tool_call>",
        "<tool_call>{\"name\": \"f\", \"arguments\": \"{\\\"a\\\": 1}\"}</tool_call>",
        "no call at all <tool_cal",
        "<tool_call>no json</tool_call>",
    ]
    .iter()
    .flat_map(|text| [2_u8, 5, 255].map(|cut| [&[cut], text.as_bytes()].concat()))
    .collect()
}
