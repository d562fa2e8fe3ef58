//! The language of the documentation, and whether what it says about the repository is true.

use crate::{
    harness::{repository, rust_sources, skipped},
    workspace::packages,
};
use skep_cli::{config::Config, server_options::ServerOptions};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Openings of fragments: a sentence that begins so has no subject before its verb, or no verb.
const FRAGMENTS: [&str; 9] = ["Of", "What", "That", "Who", "Which", "As", "So", "Nothing", "Where"];
/// Words that end like a verb in the third person and are none.
const NOUNS: [&str; 9] =
    ["Always", "Bytes", "Experts", "Its", "Options", "Pages", "Threads", "This", "Tokens"];
const README_LINES: usize = 150;

#[test]
fn documentation_is_made_of_sentences() {
    let mut faults = Vec::new();
    for file in documents(&repository()) {
        let text = fs::read_to_string(&file).unwrap();
        let mut found = [fragments(&text), negated_nouns(&file, &text), house_words(&file, &text)].concat();
        if has_extension(&file, &["rs"]) {
            let hint = "begin with what the function does, such as \"Returns\"";
            let openings = openings_without_verb(&text).into_iter();
            found.extend(openings.map(|(line, word)| {
                (line, format!("a function's documentation begins with {word:?}; {hint}"))
            }));
        }
        faults.extend(found.into_iter().map(|(line, fault)| format!("{}:{line}: {fault}", file.display())));
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// Returns the lines at which a comment, or a paragraph of one, begins with a fragment.
fn fragments(text: &str) -> Vec<(usize, String)> {
    let (mut found, mut is_inside) = (Vec::new(), false);
    for (index, line) in text.lines().enumerate() {
        let comment = comment(line).unwrap_or_default();
        let first = comment.split(' ').next().unwrap_or_default();
        if !is_inside && FRAGMENTS.contains(&first) {
            found.push((index + 1, format!("a comment begins with {first:?}")));
        }
        is_inside = !comment.is_empty();
    }
    found
}

/// Returns the lines that negate a noun instead of the verb.
fn negated_nouns(file: &Path, text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (number, line) in readable(file, text) {
        let Some((before, rest)) = line.split_once(concat!("is ", "no ")) else { continue };
        let noun = rest.split(' ').next().unwrap_or_default();
        let is_idiom =
            ["longer", "more", "less", "other", "one"].contains(&noun.trim_end_matches([',', '.', ';', ':']));
        if !is_idiom && !before.ends_with("there ") && !before.ends_with("There ") {
            found.push((number, format!("write \"is not a {noun}\"")));
        }
    }
    found
}

/// Returns the text of a line that is a comment of its own.
fn comment(line: &str) -> Option<&str> {
    let line = line.trim_start();
    let text = line.strip_prefix("//").or_else(|| line.strip_prefix("/*"))?;
    Some(text.trim_start_matches(['/', '!', '*']).trim())
}

/// Returns the lines of a file with their numbers, without the code of a Markdown page.
fn readable<'a>(file: &Path, text: &'a str) -> Vec<(usize, &'a str)> {
    let (is_page, mut is_code) = (has_extension(file, &["md"]), false);
    let lines = text.lines().enumerate().filter(|(_, line)| {
        is_code ^= is_page && line.trim_start().starts_with("```");
        !is_code
    });
    lines.map(|(index, line)| (index + 1, line)).collect()
}

fn has_extension(file: &Path, extensions: &[&str]) -> bool {
    file.extension().is_some_and(|extension| extensions.iter().any(|known| extension == *known))
}

/// Words that only the authors understand at once, with those to write instead. They are looked for in Markdown outside of
/// code, in comments, and in everything that a program says: all lines of its Rust and JavaScript, except its tests.
const HOUSE_WORDS: [(&str, &str); 14] = [
    ("told", "sent, reported or notified"),
    ("anew", "again"),
    ("goes on", "continues"),
    ("go on", "continue"),
    ("going on", "continuing"),
    ("in force", "active"),
    ("into force", "activated"),
    ("told apart", "distinguished"),
    ("tell apart", "distinguish"),
    ("kept apart", "isolated"),
    ("stands still", "stops"),
    ("is there twice", "is duplicated"),
    ("made again", "repeated, recreated or retried"),
    ("the most that", "the maximum"),
];

/// Returns the lines of a file that have such a word.
fn house_words(file: &Path, text: &str) -> Vec<(usize, String)> {
    let is_page = has_extension(file, &["md"]);
    let program = match has_extension(file, &["rs", "js"]) && !is_test(file) {
        true => text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default().lines().count(),
        false => 0,
    };
    let mut faults = Vec::new();
    for (number, line) in readable(file, text) {
        if !is_page && number > program && comment(line).is_none() {
            continue;
        }
        let words = line.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty());
        let words = format!(" {} ", words.collect::<Vec<_>>().join(" ").to_lowercase());
        let found = HOUSE_WORDS.iter().filter(|(word, _)| words.contains(&format!(" {word} ")));
        faults.extend(found.map(|(word, instead)| (number, format!("write {instead} instead of {word:?}"))));
    }
    faults
}

/// Returns whether a file has only tests, or what they run.
fn is_test(file: &Path) -> bool {
    let file = file.strip_prefix(repository()).unwrap_or(file);
    let stem = file.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
    file.iter().any(|part| part == "tests") || stem.ends_with("tests")
}

#[test]
fn fragments_and_words_of_the_house_are_found_where_readers_meet_them() {
    let lines = |found: Vec<(usize, String)>| found.into_iter().map(|(line, _)| line).collect::<Vec<_>>();
    let page = "The host goes on, `in_force` or not.\n```text\nshe was told\n```\n";
    assert_eq!(lines(house_words(Path::new("page.md"), page)), [1]);
    let source = [
        "// It was told.",
        "const A: &str = \"anew\";",
        "#[cfg(test)]",
        "mod tests {",
        "    // It goes on.",
        "    const B: &str = \"told\";",
        "}",
    ];
    let source = &source.join("\n");
    assert_eq!(lines(house_words(Path::new("host/a.rs"), source)), [1, 2, 5]);
    assert_eq!(lines(house_words(Path::new("tests/a.rs"), source)), [1, 5]);
    assert_eq!(lines(house_words(Path::new("a.cu"), source)), [1, 5]);
    let comments = [
        "// A tree,",
        "// Where birds live.",
        "//",
        "// Of a tree.",
        "let a;",
        "/// That tree.",
        "let b;",
        "/** Who asks. */",
    ];
    assert_eq!(lines(fragments(&comments.join("\n"))), [4, 6, 8]);
    let nouns = format!("A key {0} secret.\nThere {0} key.\nIt {0} longer here.\n", concat!("is", " no"));
    assert_eq!(lines(negated_nouns(Path::new("page.md"), &nouns)), [1]);
}

/// Lists the Rust, CUDA and JavaScript sources, the interfaces and the Markdown pages, except those that are kept as they were.
fn documents(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let kept = |name: &str| {
        name.starts_with('.')
            || ["target", "shared", "node_modules", "vendor", "fixtures", "CHANGELOG.md"].contains(&name)
    };
    let mut found = Vec::new();
    for path in entries.filter(|path| !kept(path.file_name().unwrap().to_str().unwrap())) {
        if path.is_dir() {
            found.extend(documents(&path));
        } else if has_extension(&path, &["rs", "cu", "cuh", "js", "mjs", "wit", "md"]) {
            found.push(path);
        }
    }
    found
}

/// Returns the lines at which the documentation of a function begins with another word than a verb in the third person, and
/// that word.
///
/// The documentation of a test says why it exists, and that of an agent is what others see of it.
fn openings_without_verb(text: &str) -> Vec<(usize, String)> {
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let mut found = Vec::new();
    let mut at = 0;
    while at < lines.len() {
        let Some(first) = lines[at].strip_prefix("///") else {
            at += 1;
            continue;
        };
        let begins = at;
        while at < lines.len() && lines[at].starts_with("///") {
            at += 1;
        }
        let (mut depth, mut is_exempt) = (0_isize, false);
        while at < lines.len() && (depth > 0 || lines[at].starts_with("#[")) {
            is_exempt |= lines[at].contains("test") || lines[at].starts_with("#[agent");
            let count = |brackets: [char; 2]| lines[at].matches(brackets).count() as isize;
            depth += count(['(', '[']) - count([')', ']']);
            at += 1;
        }
        if is_exempt || !lines.get(at).is_some_and(|line| is_function(line)) {
            continue;
        }
        let word =
            first.trim_start().split(' ').next().unwrap_or_default().trim_end_matches(['.', ',', ':', ';']);
        let is_heading = word.starts_with('#');
        if !is_heading && (!word.ends_with('s') || NOUNS.contains(&word)) {
            found.push((begins + 1, word.to_owned()));
        }
    }
    found
}

fn is_function(line: &str) -> bool {
    let mut rest = line;
    loop {
        if rest.starts_with("fn ") {
            return true;
        }
        let words = ["pub ", "default ", "const ", "async ", "unsafe ", "extern \"C\" "];
        let shorter = words.iter().find_map(|word| rest.strip_prefix(word));
        let restricted = || rest.strip_prefix("pub(")?.split_once(") ").map(|(_, rest)| rest);
        let Some(shorter) = shorter.or_else(restricted) else { return false };
        rest = shorter;
    }
}

#[test]
fn an_opening_without_a_verb_is_found() {
    let text = [
        "/// Returns it.",
        "fn a() {}",
        "",
        "/// The value.",
        "#[must_use]",
        "#[allow(",
        "    dead_code",
        ")]",
        "pub(crate) const fn b() {}",
        "/// A riddle that a test answers.",
        "#[test]",
        "fn c() {}",
        "/// The field.",
        "struct D;",
        "/// Tokens of it,",
        "/// or less.",
        "pub async fn e() {}",
        "/// # Safety",
        "unsafe fn f() {}",
    ]
    .join("\n");
    let words = [(4, "The".to_owned()), (15, "Tokens".to_owned())];
    assert_eq!(openings_without_verb(&text), words);
}

/// The public items of a crate are what readers of the other crates see of it. In an example, the documentation of a type is
/// a part of the prompt, so there its author decides.
#[test]
fn every_public_item_has_documentation() {
    let (mut faults, mut count) = (Vec::new(), 0);
    let packages = packages();
    let written = packages.iter().filter(|package| !package.folder.starts_with("examples/"));
    for file in written.flat_map(|package| rust_sources(package.sources())).filter(|file| !is_test(file)) {
        let (all, undocumented) = public_items(&fs::read_to_string(&file).unwrap());
        count += all;
        let faulty =
            |(line, item): (usize, String)| format!("{}:{line}: {item} has no documentation", file.display());
        faults.extend(undocumented.into_iter().map(faulty));
    }
    assert!(count > 1_000, "found only {count} public items");
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// Returns the number of public items outside of tests, and those without documentation with the lines at which they begin.
fn public_items(text: &str) -> (usize, Vec<(usize, String)>) {
    let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let (mut count, mut undocumented) = (0, Vec::new());
    let (mut is_documented, mut is_of_tests, mut depth) = (false, false, 0_isize);
    for (index, line) in text.lines().map(str::trim).enumerate() {
        if depth > 0 || line.starts_with("#[") || line.starts_with("$(#[") {
            is_documented |= line.contains("#[doc");
            is_of_tests |= line.contains("cfg(test)");
            let brackets = |brackets: [char; 2]| line.matches(brackets).count() as isize;
            depth = (depth + brackets(['(', '[']) - brackets([')', ']'])).max(0);
            continue;
        }
        if line.starts_with("//") {
            is_documented |= line.starts_with("///");
            continue;
        }
        if let Some(item) = public_item(line).filter(|_| !is_of_tests) {
            count += 1;
            if !is_documented {
                undocumented.push((index + 1, item.to_owned()));
            }
        }
        (is_documented, is_of_tests) = (false, false);
    }
    (count, undocumented)
}

/// Returns the public item that begins in a line, such as `fn run`.
fn public_item(line: &str) -> Option<&str> {
    let item = line.strip_prefix("pub ")?;
    let kinds = ["struct ", "enum ", "trait ", "type ", "union ", "const ", "static "];
    let is_item = is_function(item) || kinds.iter().any(|kind| item.starts_with(kind));
    is_item.then(|| item.split(['(', '{', '<', ':', ';', '=']).next().unwrap_or(item).trim())
}

#[test]
fn a_public_item_without_documentation_is_found() {
    let text = [
        "/// Returns it.",
        "#[must_use]",
        "pub fn a() {}",
        "#[derive(",
        "    Debug,",
        ")]",
        "pub struct B<T> {",
        "    pub c: fn(T),",
        "}",
        "pub const fn d() {}",
        "/// A number.",
        "// It is small.",
        "pub const E: u8 = 1;",
        "#[cfg(test)]",
        "pub fn f() {}",
        "pub(crate) fn g() {}",
        "pub use a as h;",
        "$(#[doc = $about])*",
        "#[derive(Debug)]",
        "pub enum $name {",
        "#[cfg(test)]",
        "mod tests {",
        "    pub fn i() {}",
        "}",
    ];
    let undocumented = [(7, "struct B".to_owned()), (10, "const fn d".to_owned())];
    assert_eq!(public_items(&text.join("\n")), (5, undocumented.to_vec()));
}

#[test]
fn the_readme_is_short_and_shows_the_agent_hello() {
    let readme = fs::read_to_string(repository().join("README.md")).unwrap();
    let lines = readme.lines().count();
    assert!(lines <= README_LINES, "{lines} lines; at most {README_LINES}");
    let shown = fenced(&readme, "rust");
    let agent = fs::read_to_string(repository().join("examples/hello/src/lib.rs")).unwrap();
    let (_, agent) = agent.split_once("\n\n").expect("a header");
    let (agent, _) = agent.split_once("\n\n#[cfg(test)]").expect("a test");
    assert_eq!(shown.trim_end(), agent.trim_end(), "the agent of the README is not examples/hello");
}

#[test]
fn the_picture_of_the_process_is_drawn_from_its_description() {
    let folder = repository().join("host/guide");
    let draw = Command::new("python3").args(["draw.py", "process.txt"]).current_dir(&folder).output();
    let Ok(drawn) = draw else {
        return skipped("host/guide/draw.py needs Python 3");
    };
    assert!(drawn.status.success(), "{}", String::from_utf8_lossy(&drawn.stderr));
    let picture = fs::read_to_string(folder.join("process.svg")).unwrap();
    let hint = "in host/guide, run `python3 draw.py process.txt > process.svg`";
    assert_eq!(String::from_utf8(drawn.stdout).unwrap(), picture, "{hint}");
    let readme = fs::read_to_string(repository().join("README.md")).unwrap();
    assert!(readme.contains("](host/guide/process.svg)"), "the README shows the picture");
}

#[test]
fn every_example_has_a_readme_and_is_listed() {
    let examples = repository().join("examples");
    let list = fs::read_to_string(examples.join("README.md")).unwrap();
    let (mut faults, mut count) = (Vec::new(), 0);
    for folder in fs::read_dir(&examples).unwrap().map(|entry| entry.unwrap().path()) {
        if !folder.join("agent.toml").exists() {
            continue;
        }
        count += 1;
        let name = folder.file_name().unwrap().to_str().unwrap();
        let readme = fs::read_to_string(folder.join("README.md")).unwrap_or_default();
        if !readme.starts_with(&format!("# {name}\n")) || !readme.contains("```sh\n") {
            faults.push(format!("examples/{name}/README.md: no title or no commands"));
        }
        if !list.contains(&format!("| [{name}]({name}) |")) {
            faults.push(format!("examples/README.md: no row for {name}"));
        }
    }
    assert!(count > 10, "found only {count} examples");
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn the_settings_in_the_readme_are_valid() {
    let readme = fs::read_to_string(repository().join("README.md")).unwrap();
    let mut options = ServerOptions::default();
    Config::parse(fenced(&readme, "toml")).unwrap().apply(&mut options).unwrap();
    assert_eq!((options.models.len(), options.remote.upstreams.len()), (2, 1));
}

/// Returns the first block of a language.
fn fenced<'a>(page: &'a str, language: &str) -> &'a str {
    let (_, block) = page.split_once(&format!("```{language}\n")).expect("a block of this language");
    block.split_once("```").expect("its fence is closed").0
}

/// The tables of ARCHITECTURE.md are where a reader looks for a file. A path in a row may begin at any folder that an earlier
/// path of the row names.
#[test]
fn every_path_in_the_tables_of_the_architecture_exists() {
    let text = fs::read_to_string(repository().join("ARCHITECTURE.md")).unwrap();
    let (mut faults, mut count) = (Vec::new(), 0);
    for (index, line) in text.lines().enumerate().filter(|(_, line)| line.starts_with("| ")) {
        let mut folders = vec![repository(), repository().join("host")];
        for path in line.split('`').skip(1).step_by(2).filter(|span| is_path(span)) {
            count += 1;
            // `NAME` is any file of its folder.
            let exact = match path.rsplit_once('/') {
                Some((folder, name)) if name.contains("NAME") => folder,
                _ => path,
            };
            let Some(found) =
                folders.iter().rev().map(|folder| folder.join(exact)).find(|path| path.exists())
            else {
                faults.push(format!("ARCHITECTURE.md:{}: {path} does not exist", index + 1));
                continue;
            };
            let within = found.ancestors().take_while(|folder| **folder != repository());
            let mut new: Vec<PathBuf> = within.filter(|path| path.is_dir()).map(PathBuf::from).collect();
            new.extend(new.first().map(|folder| folder.join("src")).filter(|sources| sources.is_dir()));
            new.retain(|folder| !folders.contains(folder));
            folders.extend(new);
        }
    }
    assert!(count > 60, "found only {count} paths");
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// A refusal is found by its code, wherever its text is written.
#[test]
fn the_architecture_says_where_the_text_of_each_429_is() {
    let row = |page: &str, title: &str| {
        let page = fs::read_to_string(repository().join(page)).unwrap();
        page.lines().find(|line| line.starts_with(&format!("| {title}"))).expect(title).to_owned()
    };
    let (codes, places) = (row("host/guide/http-api.md", "429"), row("ARCHITECTURE.md", "the text of a 429"));
    let spans = codes.split('`').skip(1).step_by(2);
    let codes: Vec<&str> = spans.filter(|span| *span != "Retry-After").collect();
    assert!(codes.len() > 8, "found only {codes:?}");
    let missing = codes.iter().find(|code| !places.contains(&format!("`{code}`")));
    assert_eq!(missing, None, "ARCHITECTURE.md does not say where its text is");
}

/// Returns whether a code span is a path of the repository: not a command, a route, a setting or a suffix.
fn is_path(span: &str) -> bool {
    let is_file = [".rs", ".md", ".cu", ".cuh", ".js", ".wit"].iter().any(|end| span.ends_with(end));
    (is_file || span.contains('/')) && !span.contains([' ', '[', ':']) && !span.starts_with(['/', '.'])
}

/// Returns the keys that are allowed under a header of `skep.toml`, as the parser lists them in its error for an unknown one.
fn keys(header: &str) -> Option<Vec<String>> {
    let message = skep_runtime::parse_toml::<Config>(&format!("{header}\nnot-a-field = 1\n")).err()?;
    let (_, expected) = message.split_once("unknown field `not-a-field`, expected ")?;
    Some(expected.split('`').skip(1).step_by(2).map(str::to_owned).collect())
}

#[test]
fn every_key_of_the_configuration_is_in_the_guide() {
    let guide = fs::read_to_string(repository().join("host/guide/configuration.md")).unwrap();
    let reference = guide.split_once("\n## Top level").expect("the reference").1;
    let parts: Vec<&str> = reference.split("\n## ").collect();
    let (mut faults, mut count) = (Vec::new(), 0);
    let described = |part: &str, key: &str| {
        let spans = part
            .lines()
            .filter(|line| line.starts_with('|'))
            .flat_map(|row| row.split('`').skip(1).step_by(2));
        spans.into_iter().any(|span| span.rsplit(' ').next() == Some(key))
    };
    for key in keys("").expect("top-level keys") {
        let headers = [format!("[{key}]"), format!("[{key}.NAME]"), format!("[[{key}]]")];
        let Some((header, inner)) = headers.iter().find_map(|header| Some((header, keys(header)?))) else {
            count += 1;
            if !described(parts[0], &key) {
                faults.push(format!("{key}: no row under \"Top level\""));
            }
            continue;
        };
        let title =
            |part: &&&str| part.lines().next().is_some_and(|title| title.contains(&format!("`{header}`")));
        let Some(part) = parts.iter().find(title) else {
            faults.push(format!("{header}: no heading names the section"));
            continue;
        };
        count += inner.len();
        for key in inner.iter().filter(|key| !described(part, key)) {
            faults.push(format!("{header} {key}: no row of the section has the key"));
        }
    }
    assert!(count > 80, "found only {count} keys");
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}
