//! Published chat templates: what Skep renders with them is what `transformers` renders, and has the tokens that `tokenizers`
//! makes of it. `tests/fixtures/chat-templates/render.py` made the expected texts, and `tokens.py` their tokens.

use crate::{
    clients::{installed, made},
    harness::{repository, skipped},
};
use serde_json::Value;
use sha2::{Digest, Sha256};
use skep_engine::chat::{ChatMessage, Markup, Opening, Reasoning, ToolCall, ToolSpec, prompt_text};
use skep_model::{ChatTemplate, Tokenizer};
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// The source distribution that contains the templates.
const PACKAGE: &str = "llama-cpp-python==0.3.36";
const FOLDER: &str = "vendor/llama.cpp/models/templates";
/// Conversations that are rendered otherwise on purpose, with the reason.
const OTHERWISE: [(&str, &str, &str); 1] = [(
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use.jinja",
    "text and call",
    "the template leaves out the text beside calls",
)];
/// Conversations that `transformers` does not render, with the reason.
const REFUSED: [(&str, &[&str], &str); 1] = [(
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use.jinja",
    &["plain", "turns", "reasoning", "thinking off", "thinking on"],
    "the template iterates over tools without asking whether there are any",
)];
/// Templates that write calls otherwise than the grammar of their markup, each with a text of the grammar and the one that the
/// template has in its place. What these models write themselves is read in both forms.
const WRITTEN_OTHERWISE: [(&str, &str, &str); 5] = [
    ("Qwen3-Coder.jinja", "true", "True"),
    ("Qwen3.5-4B.jinja", "true", "True"),
    ("mistralai-Mistral-Nemo-Instruct-2407.jinja", "}}]", "}, \"id\": \"aB3dE6gH9\"}]"),
    ("Mistral-Small-3.2-24B-Instruct-2506.jinja", "000000000", "aB3dE6gH9"),
    (
        "openai-gpt-oss-120b.jinja",
        "<|channel|>commentary to=functions.weather <|constrain|>json",
        " to=functions.weather<|channel|>commentary json",
    ),
];

#[test]
fn published_templates_render_as_in_transformers() {
    let Some(templates) = templates() else { return };
    let fixtures = repository().join("tests/fixtures/chat-templates");
    let json = |name: &str| -> Value {
        serde_json::from_str(&fs::read_to_string(fixtures.join(name)).unwrap()).unwrap()
    };
    let (conversations, renderings) = (json("conversations.json"), json("renderings.json"));
    let tools: Vec<ToolSpec> = conversations["tools"].as_array().unwrap().iter().map(tool).collect();
    let tokenizer = fs::read(repository().join("tests/fixtures/tokenizer/byte-level-chatml.json")).unwrap();
    let tokenizer = Tokenizer::from_json(&tokenizer).unwrap();
    let seconds = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    let (year, month, day) = skep_model::chat_template::civil_date(seconds / 86_400);
    let today = format!("{year}-{month:02}-{day:02}");
    let (mut faults, mut compared) = (Vec::new(), 0);
    for (name, expected) in renderings.as_object().unwrap() {
        let source = fs::read_to_string(templates.join(name)).unwrap();
        let digest: String = Sha256::digest(&source).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(digest, expected["sha256"], "{name} is another template");
        let template = ChatTemplate::new(&source, Some("<s>".into()), Some("</s>".into())).unwrap();
        for (case, conversation) in conversations["cases"].as_object().unwrap() {
            let is_refused =
                REFUSED.iter().any(|(of, cases, _)| of == name && cases.contains(&case.as_str()));
            let rest = expected["cases"][case].as_str();
            assert_eq!(
                rest.is_none(),
                is_refused,
                "{name}: {case}: only listed conversations may be left out"
            );
            let Some(rest) = rest else { continue };
            if OTHERWISE.iter().any(|(of, left_out, _)| of == name && left_out == case) {
                continue;
            }
            let start = if conversation["tools"] == true { "tools" } else { "plain" };
            let wanted =
                format!("{}{rest}", expected["starts"][start].as_str().unwrap()).replace("{today}", &today);
            let messages: Vec<ChatMessage> =
                conversation["messages"].as_array().unwrap().iter().map(message).collect();
            let reasoning = Reasoning {
                enabled: conversation["variables"]["thinking"].as_bool(),
                ..Reasoning::default()
            };
            let shows_tools = conversation["tools"] == true && expected["tools"] == true;
            let opening = Opening {
                tools: if shows_tools { &tools } else { &[] },
                examples: &[],
                reasoning: Some(&reasoning),
            };
            compared += 1;
            match prompt_text(&template, &tokenizer, &messages, opening) {
                Ok(text) if text == wanted => {}
                Ok(text) => faults.push(format!("{name}: {case}:\n{}", difference(&text, &wanted))),
                Err(error) => faults.push(format!("{name}: {case}: {error}")),
            }
        }
    }
    for (name, cases, reason) in REFUSED {
        eprintln!("{name} without {}: {reason}", cases.join(", "));
    }
    for (name, case, reason) in OTHERWISE {
        eprintln!("{name} without {case}: {reason}");
    }
    eprintln!("{compared} conversations compared, {} differ", faults.len());
    assert!(compared == 194 && faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn an_effort_reaches_the_published_template_that_asks_for_one() {
    let Some(templates) = templates() else { return };
    let tokenizer = fs::read(repository().join("tests/fixtures/tokenizer/byte-level-chatml.json")).unwrap();
    let tokenizer = Tokenizer::from_json(&tokenizer).unwrap();
    let rendered = |file: &str, effort: Option<&str>| {
        let source = fs::read_to_string(templates.join(file)).unwrap();
        let template = ChatTemplate::new(&source, Some("<s>".into()), Some("</s>".into())).unwrap();
        let reasoning = Reasoning { effort: effort.map(str::to_owned), ..Reasoning::default() };
        let opening = Opening { tools: &[], examples: &[], reasoning: Some(&reasoning) };
        prompt_text(&template, &tokenizer, &[ChatMessage::user("Why?")], opening).unwrap()
    };
    for (effort, shown) in [(None, "medium"), (Some("low"), "low"), (Some("high"), "high")] {
        let text = rendered("openai-gpt-oss-120b.jinja", effort);
        assert!(text.contains(&format!("Reasoning: {shown}\n")), "{effort:?}: {text}");
    }
    let qwen = "Qwen-Qwen3-0.6B.jinja";
    assert_eq!(rendered(qwen, Some("high")), rendered(qwen, None), "a template without efforts");
}

/// Returns the template, the markup and the conversations of each row of the guide's table.
fn listed_in_guide(guide: &str) -> Vec<[String; 3]> {
    let table =
        guide.split("\n## ").find(|section| section.starts_with("Golden transcripts")).expect("a section");
    let cells = |row: &str| -> Vec<String> {
        row.split(" | ").map(|cell| cell.trim_matches(['|', ' ', '`']).to_owned()).collect()
    };
    let rows = table.lines().filter(|line| line.starts_with("| `"));
    rows.map(|row| cells(row).try_into().expect("three cells")).collect()
}

#[test]
fn published_templates_have_the_markup_of_the_guide_and_write_the_calls_of_its_grammar() {
    let Some(templates) = templates() else { return };
    let read = |path: &str| fs::read_to_string(repository().join(path)).unwrap();
    let json = |name: &str| -> Value {
        serde_json::from_str(&read(&format!("tests/fixtures/chat-templates/{name}"))).unwrap()
    };
    let (conversations, renderings) = (json("conversations.json"), json("renderings.json"));
    let messages = conversations["cases"]["call"]["messages"].as_array().unwrap();
    let calls =
        messages.iter().map(message).find(|message| !message.tool_calls.is_empty()).unwrap().tool_calls;
    let listed = listed_in_guide(&read("host/guide/clients.md"));
    assert_eq!(listed.len(), renderings.as_object().unwrap().len());
    for [template, name, _] in listed {
        let file = format!("{template}.jinja");
        let markup = Markup::of_model(&fs::read_to_string(templates.join(&file)).unwrap(), None);
        assert_eq!(markup.name, name, "{template}");
        let of = &renderings[&file];
        let part = |part: &Value| part.as_str().unwrap().to_owned();
        let rendered = part(&of["starts"]["tools"]) + &part(&of["cases"]["call"]);
        let written = markup.assistant("", &calls);
        let otherwise = WRITTEN_OTHERWISE.iter().find(|(of, ..)| *of == file);
        assert_eq!(
            rendered.contains(&written),
            otherwise.is_none(),
            "{template}: {written:?} in {rendered:?}"
        );
        if let Some((_, from, to)) = otherwise {
            let written = written.replace(from, to);
            assert!(rendered.contains(&written), "{template}: {written:?} in {rendered:?}");
        }
    }
}

#[test]
fn the_guide_lists_the_templates_with_their_conversations() {
    let read = |path: &str| fs::read_to_string(repository().join(path)).unwrap();
    let renderings: Value =
        serde_json::from_str(&read("tests/fixtures/chat-templates/renderings.json")).unwrap();
    let guide = read("host/guide/clients.md");
    let listed = listed_in_guide(&guide).into_iter().map(|[template, _, conversations]| {
        let digits = conversations.split(|c: char| !c.is_ascii_digit()).next().unwrap_or_default();
        (format!("{template}.jinja"), digits.parse().expect("a number of conversations"))
    });
    let recorded = renderings.as_object().unwrap().iter().map(|(name, of)| {
        let cases = of["cases"].as_object().unwrap();
        (name.clone(), cases.values().filter(|case| case.is_string()).count())
    });
    assert_eq!(listed.collect::<BTreeMap<String, usize>>(), recorded.collect());
    assert!(guide.contains(&PACKAGE.replace("==", "` ")), "the guide names another version than {PACKAGE}");
}

/// The tokens of the same texts. `tests/fixtures/chat-templates/tokens.py` made the expected ones with the package `tokenizers`.
#[test]
fn published_renderings_have_the_tokens_of_the_package_tokenizers() {
    let fixtures = repository().join("tests/fixtures/chat-templates");
    let json = |name: &str| -> Value {
        serde_json::from_str(&fs::read_to_string(fixtures.join(name)).unwrap()).unwrap()
    };
    let (expected, renderings) = (json("tokens.json"), json("renderings.json"));
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("chat-tokenizers");
    let names: Vec<&String> = expected["tokens"].as_object().unwrap().keys().collect();
    let Some(folder) = tokenizers(&fixtures.join("tokens.py"), folder, &names) else { return };
    let today = expected["today"].as_str().unwrap();
    let (mut faults, mut compared, mut marked) = (Vec::new(), 0, 0);
    for (tokenizer_name, templates) in expected["tokens"].as_object().unwrap() {
        let tokenizer = fs::read(folder.join(format!("{tokenizer_name}.json"))).unwrap();
        let tokenizer = Tokenizer::from_json(&tokenizer).unwrap();
        let marks = expected["marks"][tokenizer_name].as_object();
        for (mark, ids) in marks.into_iter().flatten() {
            let found = tokenizer.encode(mark, skep_model::SpecialTokens::Parse).unwrap();
            assert_eq!((&Value::from(found.clone()), found.len()), (ids, 1), "{tokenizer_name}: {mark}");
            marked += 1;
        }
        for (template, cases) in templates.as_object().unwrap() {
            for (case, tokens) in cases.as_object().unwrap() {
                let (start, case) = case.split_once('/').unwrap();
                let rendering = &renderings[template];
                let part = |part: &Value| part.as_str().unwrap().to_owned();
                let text = part(&rendering["starts"][start]) + &part(&rendering["cases"][case]);
                let text = text.replace("{today}", today);
                let ids = tokenizer.encode(&text, skep_model::SpecialTokens::Parse).unwrap();
                let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
                let digest: String =
                    Sha256::digest(&bytes)[..16].iter().map(|byte| format!("{byte:02x}")).collect();
                compared += 1;
                if (&Value::from(ids.len()), &Value::from(digest)) != (&tokens[0], &tokens[1]) {
                    faults
                        .push(format!("{tokenizer_name}: {template}: {start}/{case}: {} tokens", ids.len()));
                }
            }
        }
    }
    eprintln!(
        "{compared} texts compared, {} have other tokens; {marked} texts of markup are one token",
        faults.len()
    );
    assert!(compared > 1200 && marked == 15 && faults.is_empty(), "{}", faults.join("\n"));
}

/// Returns the folder of the tokenizers, which are fetched once; `None` if they cannot be had.
fn tokenizers(script: &Path, folder: PathBuf, names: &[&String]) -> Option<PathBuf> {
    if names.iter().all(|name| folder.join(format!("{name}.json")).exists()) {
        return Some(folder);
    }
    let made = Command::new("python3").arg(script).arg(&folder).output();
    match made {
        Ok(made) if made.status.success() => Some(folder),
        Ok(made) => {
            let why = String::from_utf8_lossy(&made.stderr).into_owned();
            skipped(&format!("the tokenizers cannot be fetched: {why}"));
            None
        }
        Err(error) => {
            skipped(&format!("the tokenizers cannot be fetched: {error}"));
            None
        }
    }
}

fn difference(found: &str, wanted: &str) -> String {
    let same = found.chars().zip(wanted.chars()).take_while(|(a, b)| a == b).count();
    let part = |text: &str| text.chars().skip(same.saturating_sub(40)).take(160).collect::<String>();
    format!("  found  {:?}\n  wanted {:?}", part(found), part(wanted))
}

fn tool(json: &Value) -> ToolSpec {
    let function = &json["function"];
    let text = |key: &str| function[key].as_str().unwrap().to_owned();
    ToolSpec {
        name: text("name"),
        description: text("description"),
        parameters: function["parameters"].clone(),
    }
}

fn message(json: &Value) -> ChatMessage {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let content = text(&json["content"]);
    match json["role"].as_str().unwrap() {
        "system" => ChatMessage::system(content),
        "user" => ChatMessage::user(content),
        "tool" => ChatMessage::tool(text(&json["tool_call_id"]), content),
        _ => {
            let call = |call: &Value| ToolCall {
                id: text(&call["id"]),
                name: text(&call["function"]["name"]),
                arguments: text(&call["function"]["arguments"]),
            };
            ChatMessage {
                tool_calls: json["tool_calls"].as_array().into_iter().flatten().map(call).collect(),
                reasoning: json["reasoning_content"].as_str().map(str::to_owned),
                ..ChatMessage::assistant(content)
            }
        }
    }
}

/// Returns the folder of the templates, which is fetched once; `None` if it cannot be had.
pub fn templates() -> Option<PathBuf> {
    let folder = made("chat-templates", &[PACKAGE], fetch_templates)?;
    Some(folder.join("templates"))
}

/// Puts the templates of the source distribution into a new folder.
fn fetch_templates(folder: &Path) -> Result<(), String> {
    fs::create_dir_all(folder).unwrap();
    let arguments = ["-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-python"];
    installed(Command::new("python3").args(arguments).arg("--dest").arg(folder).arg(PACKAGE))?;
    let entries = || fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let archive = entries().find(|path| path.extension().is_some_and(|ext| ext == "gz"));
    let mut unpack = Command::new("tar");
    unpack.arg("-xzf").arg(archive.expect("pip downloaded an archive")).arg("-C").arg(folder);
    installed(unpack.args(["--wildcards", &format!("*/{FOLDER}/*")]))?;
    let inside = entries().map(|path| path.join(FOLDER)).find(|path| path.exists());
    fs::rename(inside.expect("the archive has templates"), folder.join("templates")).unwrap();
    Ok(())
}
