//! DeepSeek V3.1: calls in a section, each a name and JSON. The published template shows no tools: its model card puts them
//! into the system message.

use std::fmt::Write;

use super::deepseek_v3::{BEGIN, END, RESERVED, SECTION, SECTION_END, SEPARATOR, TOKENS, reading};
use super::{CallForm, CallIds, Markup, Part, Parts};
use crate::chat::message::ToolSpec;

pub(super) static MARKUP: Markup = Markup {
    name: "deepseek-v3.1",
    signs: &[&[BEGIN, SEPARATOR]],
    call: CallForm::Parts(Parts {
        before_text: &[],
        before: &[Part::Text(SECTION)],
        call: &[Part::Text(BEGIN), Part::Name, Part::Text(SEPARATOR), Part::Arguments, Part::Text(END)],
        between: &[],
        after: &[Part::Text(SECTION_END)],
        only_first: false,
        many: true,
    }),
    reading: reading(),
    tokens: &TOKENS,
    reserved: &RESERVED,
    ids: CallIds::Own,
    reasoning_field: "reasoning_content",
    declaration: Some(declare),
};

/// Describes the tools as the model was trained to read them.
fn declare(tools: &[ToolSpec]) -> String {
    let mut text = String::from("## Tools\nYou have access to the following tools:\n");
    for ToolSpec { name, description, parameters } in tools {
        let parameters = skep_model::spelled_json(parameters);
        write!(text, "\n### {name}\nDescription: {description}\n\nParameters: {parameters}\n")
            .expect("writing to a string");
    }
    write!(
        text,
        "\nIMPORTANT: ALWAYS adhere to this exact format for tool use:\n\
         {SECTION}{BEGIN}tool_call_name{SEPARATOR}tool_call_arguments{END}{{additional_tool_calls}}{SECTION_END}\n\n\
         Where:\n\
         - `tool_call_name` must be an exact match to one of the available tools\n\
         - `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema\n\
         - For multiple tool calls, chain them directly without separators or spaces"
    )
    .expect("writing to a string");
    text
}
