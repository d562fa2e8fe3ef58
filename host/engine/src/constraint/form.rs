//! The whole output as a grammar: a JSON document, tool calls, or a grammar that the caller wrote.
//!
//! Invariant: the grammar accepts what the documents in it accept, with the same white space everywhere. The
//! chat's parser finds every tool call that the grammar accepts.

use std::fmt::Write;
use std::sync::Arc;

use llguidance::api::{GrammarWithLexer, ParserLimits, TopLevelGrammar};
use serde_json::{Value, json};

use super::document::Document;
use super::drafts::Draft;
use super::relaxed::RelaxedSchema;
use super::spelling::AcceptedSpelling;
use super::unenforced::UnenforcedValue;
use super::{call_parts, rule_grammar, schema_keywords};
use crate::request::{BeforeCalls, CallMarkup, Constraint, ObjectMarkup, ToolCallForm};

/// Maximum number of calls in one answer if parallel calls are allowed.
pub(super) const MAX_CALLS: usize = 16;

/// The condition under which an output is complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ending {
    /// The output is complete when only white space could follow.
    Document,
    /// Same as `Document`, but only the end of a call can meet the condition.
    Calls,
    /// The output is complete when nothing could follow.
    Own,
}

/// A constraint before it is compiled.
pub(super) struct Form {
    kind: Kind,
    /// The JSON documents in the constraint, each with the tool whose arguments it describes.
    pub documents: Vec<(Option<String>, Document)>,
}

enum Kind {
    Json,
    Calls(ToolCallForm),
    /// A grammar that the caller wrote.
    Own(Box<TopLevelGrammar>),
}

impl Form {
    /// Checks a constraint and every schema in it. The error is a message for the caller, which names the tool at
    /// fault.
    pub fn of(constraint: &Constraint, limits: &ParserLimits) -> Result<Form, String> {
        let own = |single| {
            Ok(Form {
                kind: Kind::Own(Box::new(TopLevelGrammar::from_grammar(single))),
                documents: Vec::new(),
            })
        };
        let json = |schema: &Value| {
            Ok(Form { kind: Kind::Json, documents: vec![(None, Document::new(schema, limits)?)] })
        };
        match constraint {
            Constraint::JsonSchema(schema) => json(schema),
            Constraint::JsonObject => json(&json!({"type": "object"})),
            Constraint::Regex(pattern) => own(GrammarWithLexer::from_regex(pattern)),
            Constraint::Lark(source) => own(GrammarWithLexer::from_lark(source.clone())),
            Constraint::ToolCalls(form) => {
                let mut documents = Vec::new();
                for tool in &form.tools {
                    let document = object_schema(&tool.parameters)
                        .and_then(|schema| Document::new(&schema, limits))
                        .map_err(|message| {
                            format!("the parameters of the tool `{}`: {message}", tool.name)
                        })?;
                    documents.push((Some(tool.name.clone()), document));
                }
                if let BeforeCalls::Answer(answer) = &form.before {
                    match answer.as_ref() {
                        Constraint::JsonSchema(schema) => {
                            documents.push((None, Document::new(schema, limits)?))
                        }
                        Constraint::JsonObject => {
                            documents.push((None, Document::new(&json!({"type": "object"}), limits)?));
                        }
                        Constraint::Regex(_) => {}
                        Constraint::Lark(_) | Constraint::ToolCalls(_) => {
                            return Err("a grammar cannot be an alternative to tool calls; \
                                        use a JSON schema or a regular expression"
                                .to_string());
                        }
                    }
                }
                Ok(Form { kind: Kind::Calls(form.clone()), documents })
            }
        }
    }

    /// Returns the condition under which the output is complete.
    pub fn ending(&self) -> Ending {
        match &self.kind {
            Kind::Json => Ending::Document,
            Kind::Calls(ToolCallForm { before: BeforeCalls::Answer(_), .. }) => Ending::Document,
            Kind::Calls(_) => Ending::Calls,
            Kind::Own(_) => Ending::Own,
        }
    }

    /// Returns whether there is more than one way to write the output.
    pub fn has_spellings(&self) -> bool {
        !matches!(self.kind, Kind::Own(_))
    }

    /// Returns the current schemas of the documents.
    pub fn parts(&self) -> Vec<RelaxedSchema> {
        self.documents.iter().map(|(_, document)| document.relaxed()).collect()
    }

    /// Relaxes the parts of the single documents that the compiler cannot follow. Returns whether there were
    /// any.
    pub fn settle(&mut self) -> Result<bool, String> {
        let mut changed = false;
        for (tool, document) in &mut self.documents {
            changed |= document.settle().map_err(|message| match tool {
                Some(tool) => format!("the parameters of the tool `{tool}`: {message}"),
                None => message,
            })?;
        }
        Ok(changed)
    }

    /// Returns the values that a mask made of `parts` does not enforce in full.
    pub fn unenforced(&self, parts: &[RelaxedSchema]) -> Arc<[UnenforcedValue]> {
        let of_part = |((tool, document), part): (&(Option<String>, Document), &RelaxedSchema)| {
            let values = match &self.kind {
                Kind::Calls(form) if tool.is_some() && form.markup.parameters().is_some() => {
                    document.unenforced_arguments(part).into()
                }
                _ => document.unenforced(part),
            };
            let named = values.iter().map(|value| UnenforcedValue { tool: tool.clone(), ..value.clone() });
            named.collect::<Vec<_>>()
        };
        self.documents.iter().zip(parts).flat_map(of_part).collect()
    }

    /// Returns the warnings of all documents; those of parameters name their tool.
    pub fn warnings(&self) -> Arc<[String]> {
        let of_document = |(tool, document): &(Option<String>, Document)| {
            let of_tool = |warning: &String| match tool {
                Some(tool) => format!("the parameters of the tool `{tool}`: {warning}"),
                None => warning.clone(),
            };
            document.warnings().iter().map(of_tool).collect::<Vec<_>>()
        };
        self.documents.iter().flat_map(of_document).collect()
    }

    /// Returns the grammar of the whole output. `parts` has one schema for each document, in their order.
    pub fn grammar(&self, parts: &[RelaxedSchema], written: AcceptedSpelling) -> TopLevelGrammar {
        let source = match &self.kind {
            Kind::Own(grammar) => return (**grammar).clone(),
            Kind::Json => {
                let document = &parts[0];
                let gap = written.gap();
                format!(
                    "%llguidance {{}}\nstart: {gap}document {gap}\n{}document: {}\n",
                    written.rules(),
                    nested(document, written)
                )
            }
            Kind::Calls(form) => match &form.markup {
                CallMarkup::Object(markup) => calls(form, markup, parts, written),
                CallMarkup::Parts(markup) => call_parts::calls(form, markup, parts, written),
            },
        };
        TopLevelGrammar::from_grammar(GrammarWithLexer::from_lark(source))
    }
}

/// Returns a document as a grammar within another grammar.
pub(super) fn nested(part: &RelaxedSchema, written: AcceptedSpelling) -> String {
    let rules = part.as_rules.then(|| rule_grammar::rules(part, written)).flatten();
    match rules {
        Some(rules) => format!("%lark {{\n{rules}}}"),
        None => format!("%json {}", written.schema(&part.schema, part.unicode_escapes)),
    }
}

/// Returns the grammar of calls. Every call is `OPEN {"name": NAME, "arguments": ARGUMENTS} CLOSE`, with white
/// space wherever JSON has it.
fn calls(
    form: &ToolCallForm,
    markup: &ObjectMarkup,
    parts: &[RelaxedSchema],
    written: AcceptedSpelling,
) -> String {
    let mut grammar = String::from("%llguidance {}\n");
    let mut line = |text: std::fmt::Arguments<'_>| {
        grammar.write_fmt(text).expect("writing to a string");
        grammar.push('\n');
    };
    let gap = written.gap();
    let open = if markup.open_is_special { markup.open.clone() } else { literal(&markup.open) };
    let between = match written {
        AcceptedSpelling::Any => "GAP? ".to_string(),
        AcceptedSpelling::Single(_) => format!("{} ", literal(&markup.between)),
    };
    let more =
        if form.parallel { format!(" ({between}opened){{0,{}}}", MAX_CALLS - 1) } else { String::new() };
    let text = text_without(markup.reserved.iter().map(String::as_str));
    match &form.before {
        BeforeCalls::Nothing => line(format_args!("start: {gap}opened{more} {gap}")),
        BeforeCalls::Answer(answer) => {
            let answer = answer_grammar(answer, parts.last(), written);
            line(format_args!("start: {gap}opened{more} {gap} | {gap}answer {gap}\nanswer: {answer}"));
        }
        BeforeCalls::Text if markup.open_is_special => {
            line(format_args!("start: TEXT | TEXT opened{more} {gap}\n{text}"));
        }
        // The lazy rule ends with the first opening marker, whatever follows it in the same token.
        BeforeCalls::Text => {
            line(format_args!("start: TEXT | lead body{more} {gap}\nlead[lazy]: TEXT {open}\n{text}"))
        }
    }
    let lazy = form.before == BeforeCalls::Text && !markup.open_is_special;
    if form.parallel || !lazy {
        line(format_args!("opened: {open} body"));
    }
    // In a single spelling, the call stands on separate lines, as templates write it.
    let edge = |spaced| match written {
        AcceptedSpelling::Any => written.pattern(""),
        AcceptedSpelling::Single(_) => spaced,
    };
    let (gap_regex, after_colon) = (written.pattern(""), written.pattern(" "));
    let newline = || "\\n".to_string();
    line(format_args!("HEAD: /{}\\{{{gap_regex}\"name\"{gap_regex}:{after_colon}/", edge(newline())));
    line(format_args!("MIDDLE: /{gap_regex},{after_colon}\"arguments\"{gap_regex}:{after_colon}/"));
    line(format_args!("TAIL: /{gap_regex}\\}}{}{}/", edge(newline()), regex_literal(&markup.close)));
    let names = (0..form.tools.len()).map(|index| format!("call_{index}")).collect::<Vec<_>>().join(" | ");
    line(format_args!("body: HEAD ({names}) TAIL"));
    for (index, (tool, part)) in form.tools.iter().zip(parts).enumerate() {
        // Tool names contain no characters that JSON escapes.
        let name = literal(&Value::from(tool.name.as_str()).to_string());
        let arguments = nested(part, written);
        line(format_args!("call_{index}: {name} MIDDLE arguments_{index}\narguments_{index}: {arguments}"));
    }
    if written == AcceptedSpelling::Any {
        grammar.push_str(&written.rules());
    }
    grammar
}

/// Returns the grammar of an answer that replaces calls. `part` is the last document of the form.
pub(super) fn answer_grammar(
    answer: &Constraint,
    part: Option<&RelaxedSchema>,
    written: AcceptedSpelling,
) -> String {
    match answer {
        Constraint::Regex(regex) => format!("/{}/", slashes_escaped(regex)),
        _ => part.map_or_else(String::new, |part| nested(part, written)),
    }
}

/// Returns the terminal `TEXT`, which is any text that contains none of `reserved`.
pub(crate) fn text_without<'a>(reserved: impl Iterator<Item = &'a str>) -> String {
    let reserved: Vec<String> = reserved.map(regex_literal).collect();
    match reserved.is_empty() {
        true => "TEXT: /(\\n|.)*/".to_string(),
        false => format!("TEXT: /(\\n|.)*/ & ~/(\\n|.)*({})(\\n|.)*/", reserved.join("|")),
    }
}

/// Returns the schema of arguments, which are an object even if the schema does not say so.
fn object_schema(schema: &Value) -> Result<Value, String> {
    let Value::Object(members) = schema else { return Ok(schema.clone()) };
    let mut members = members.clone();
    let is_alone = members.contains_key("$ref") && Draft::of(schema).ignores_siblings_of_ref();
    match members.get("type") {
        // The referenced schema decides.
        None if is_alone => {}
        Some(Value::String(kind)) if kind != "object" && schema_keywords::TYPES.contains(&kind.as_str()) => {
            return Err(format!("arguments must be an object, but `type` at `/type` is {kind:?}"));
        }
        Some(Value::Array(kinds)) if !kinds.iter().any(|kind| kind == "object") => {
            return Err("arguments must be an object, which `type` at `/type` does not allow".to_string());
        }
        Some(Value::Array(_)) | None => _ = members.insert("type".to_string(), json!("object")),
        Some(_) => {}
    }
    Ok(members.into())
}

pub(super) fn literal(text: &str) -> String {
    Value::from(text).to_string()
}

/// Returns the text as a regular expression that may stand between slashes.
pub(super) fn regex_literal(text: &str) -> String {
    let mut escaped = String::new();
    for c in text.chars() {
        if !c.is_alphanumeric() && c.is_ascii() && !matches!(c, '<' | '>' | '_' | ' ' | '=' | ':') {
            escaped.push('\\');
        }
        escaped.push(c);
    }
    escaped
}

/// Escapes the slashes of a regular expression, so that it may stand between slashes. Escaped ones are left as
/// they are.
pub(super) fn slashes_escaped(regex: &str) -> String {
    let mut out = String::with_capacity(regex.len());
    let mut escaped = false;
    for c in regex.chars() {
        match c {
            '/' if !escaped => out.push_str("\\/"),
            '\n' => out.push_str("\\n"),
            c => out.push(c),
        }
        escaped = c == '\\' && !escaped;
    }
    out
}
