//! Answers of upstreams, which are other people's servers.

use skep_providers::{
    UpstreamKind::{Anthropic, OpenAi, WorkersAi},
    fuzz,
};

pub(crate) const WORDS: &[&str] = &[
    "data: ",
    "event: ",
    ":",
    "\n\n",
    "\r\n\r\n",
    "[DONE]",
    "{\"choices\": [{\"delta\": {",
    "\"content\": \"",
    "\"reasoning_content\": \"",
    "\"tool_calls\": [{\"index\": 0, \"id\": \"",
    "\"function\": {\"name\": \"",
    "\"arguments\": \"",
    "\"finish_reason\": \"",
    "\"usage\": {\"prompt_tokens\": ",
    "\"type\": \"content_block_delta\"",
    "\"partial_json\": \"",
    "\"response\": \"",
    "\"success\": false",
    "\"errors\": [{\"code\": 3040",
    "\"error\": {\"message\": \"",
    "}}",
    "]}",
    "null",
];

/// Reads the answer. The first two bytes say which server sent it, and how it is split.
pub(crate) fn answer(input: &[u8]) {
    let [kind, cut, stream @ ..] = input else { return };
    let kind = [OpenAi, Anthropic, WorkersAi][usize::from(*kind) % 3];
    fuzz::read_answer(kind, stream, usize::from(*cut));
    fuzz::read_document(kind, &String::from_utf8_lossy(stream), 200 + u16::from(*cut));
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let texts = [
        "data: {\"choices\": [{\"delta\": {\"content\": \"Hi\"}}]}\n\ndata: {\"choices\": [{\"delta\": {\"tool_calls\": \
         [{\"index\": 0, \"id\": \"c\", \"function\": {\"name\": \"f\", \"arguments\": \"{}\"}}]}, \"finish_reason\": \
         \"tool_calls\"}], \"usage\": {\"prompt_tokens\": 1}}\n\ndata: [DONE]\n\n",
        "event: x\ndata: {\"type\": \"content_block_start\", \"index\": 1, \"content_block\": {\"type\": \"tool_use\", \"id\": \
         \"t\", \"name\": \"f\", \"input\": {}}}\n\ndata: {\"type\": \"content_block_delta\", \"index\": 1, \"delta\": {\"type\": \
         \"input_json_delta\", \"partial_json\": \"{}\"}}\n\ndata: {\"type\": \"message_stop\"}\n\n",
        "data: {\"response\": \"Hi\"}\r\n\r\ndata: {\"tool_calls\": [{\"name\": \"f\", \"arguments\": {}}], \"usage\": \
         {\"completion_tokens\": 3}}\r\n\r\ndata: [DONE]\r\n\r\n",
        "{\"success\": false, \"errors\": [{\"code\": 3040, \"message\": \"busy\"}]}",
        "{\"error\": {\"message\": \"too long\", \"code\": \"context_length_exceeded\"}}",
    ];
    let seed = |text: &str, kind: u8, cut: u8| [&[kind, cut], text.as_bytes()].concat();
    texts.iter().flat_map(|text| [0, 1, 2].map(|kind| seed(text, kind, 3 + 40 * kind))).collect()
}
