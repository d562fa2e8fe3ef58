//! The structure of each crate: no import cycles, one module layout, small structs.
//!
//! The sources are read as text, without tests. An import of something that the crate's root re-exports counts as one of the
//! module that defines it.

use crate::{
    harness::{repository, rust_sources},
    workspace::packages,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

const MOST_FIELDS: usize = 16;
/// Structs with more fields, which hold settings.
const SETTINGS: [(&str, &str); 7] = [
    ("host/cli/src/config/engine.rs", "EngineConfig"),
    ("host/cli/src/config/mod.rs", "Config"),
    ("host/cli/src/config/model.rs", "ModelConfig"),
    ("host/cli/src/server_options.rs", "ServerOptions"),
    ("host/model/src/config/mod.rs", "ModelConfig"),
    ("host/model/src/executor/mod.rs", "ExecutorOptions"),
    ("host/runtime/src/options/mod.rs", "RuntimeOptions"),
];
/// Structs with more fields, which are requests as clients write them.
const REQUESTS: [(&str, &str); 2] = [
    ("host/engine/src/chat/options.rs", "ChatOptions"),
    ("host/gateway/src/openai/parameters.rs", "Parameters"),
];

/// Languages of blocks in documentation that are not doc tests.
const OTHER_LANGUAGES: [&str; 4] = ["json", "sh", "text", "toml"];

type Edges = BTreeMap<String, BTreeMap<String, BTreeSet<String>>>;

#[test]
fn the_modules_of_a_crate_form_no_import_cycle() {
    let mut faults = Vec::new();
    for package in packages() {
        let edges = imports(package.sources());
        for cycle in cycles(&edges) {
            let because = cycle.iter().flat_map(|from| {
                let inside = edges[from].iter().filter(|(to, _)| cycle.contains(*to));
                inside.map(move |(to, items)| {
                    let items: Vec<&str> = items.iter().map(String::as_str).collect();
                    format!("    {from} uses {to}: {}", items.join(", "))
                })
            });
            let because: Vec<String> = because.collect();
            faults.push(format!(
                "{}: {} import each other\n{}",
                package.folder,
                cycle.join(", "),
                because.join("\n")
            ));
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn a_directory_of_modules_has_a_mod_rs() {
    for package in packages() {
        for file in rust_sources(package.sources()) {
            let folder = file.with_extension("");
            assert!(!folder.is_dir(), "move {} to {}/mod.rs", file.display(), folder.display());
        }
    }
}

#[test]
fn a_struct_has_few_fields() {
    let mut faults = Vec::new();
    let mut exempt: Vec<(&str, &str)> = SETTINGS.into_iter().chain(REQUESTS).collect();
    for file in packages().iter().flat_map(|package| rust_sources(package.sources())) {
        let text = without_tests(&plain(&fs::read_to_string(&file).unwrap()));
        for (at, _) in text.match_indices("struct ") {
            let Some(open) =
                text[at..].find(['{', ';', '(']).filter(|open| text[at + open..].starts_with('{'))
            else {
                continue;
            };
            let name: String =
                text[at + 7..].chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            let body = balanced(&text[at + open..]);
            let fields = split(&body[1..body.len() - 1]).iter().filter(|field| field.contains(':')).count();
            if fields <= MOST_FIELDS {
                continue;
            }
            let path = file.strip_prefix(repository()).unwrap().to_str().unwrap();
            match exempt.iter().position(|known| *known == (path, name.as_str())) {
                Some(at) => {
                    exempt.remove(at);
                }
                None => faults.push(format!("{path}: {name} has {fields} fields; it is several things")),
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    assert!(exempt.is_empty(), "these structs need no exception: {exempt:?}");
}

/// Cargo starts rustdoc for each crate that may have doc tests, and rustdoc reads all of a large one to find none. A block of Rust in
/// a crate that says it has none would be neither compiled nor run.
#[test]
fn a_crate_without_doc_tests_says_so_and_has_no_block_of_rust() {
    let (mut faults, mut without) = (Vec::new(), 0);
    for package in packages() {
        let blocks: Vec<String> =
            rust_sources(package.sources()).iter().flat_map(|file| documented_rust(file)).collect();
        match package.has_doc_tests {
            true if blocks.is_empty() && package.folder.starts_with("host/") => {
                faults.push(format!("{}: write `doctest = false` below [lib]", package.folder));
            }
            true => {}
            false => {
                without += 1;
                faults.extend(blocks);
            }
        }
    }
    assert!(without > 10, "found only {without} crates");
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// Returns where the documentation in a file has a block that rustdoc takes for Rust.
fn documented_rust(file: &Path) -> Vec<String> {
    let (mut found, mut is_open) = (Vec::new(), false);
    for (index, line) in fs::read_to_string(file).unwrap().lines().enumerate() {
        let line = line.trim_start();
        let Some(comment) = line.strip_prefix("///").or_else(|| line.strip_prefix("//!")) else { continue };
        let Some(language) = comment.trim().strip_prefix("```") else { continue };
        is_open = !is_open;
        if is_open && !OTHER_LANGUAGES.contains(&language) {
            found.push(format!("{}:{}: its doc tests do not run", file.display(), index + 1));
        }
    }
    found
}

/// Returns what each top-level module imports of the others, with the items.
fn imports(root: &Path) -> Edges {
    let lib = without_tests(&plain(&fs::read_to_string(root.join("lib.rs")).unwrap()));
    let modules: BTreeSet<String> = statements(&lib, "mod ").into_iter().collect();
    let mut exported = BTreeMap::new();
    for path in statements(&lib, "use ").iter().flat_map(|tree| expanded(tree)) {
        let path = path.trim_start_matches("crate::").trim_start_matches("self::").to_owned();
        let (first, name) = (path.split("::").next().unwrap(), path.rsplit("::").next().unwrap());
        if modules.contains(first) {
            exported.insert(name.to_owned(), first.to_owned());
        }
    }
    let tests = test_files(root);
    let mut edges: Edges = modules.iter().map(|module| (module.clone(), BTreeMap::new())).collect();
    for file in rust_sources(root).into_iter().filter(|file| !tests.iter().any(|test| file.starts_with(test)))
    {
        let relative = file.strip_prefix(root).unwrap().with_extension("");
        let mut module: Vec<String> = relative.iter().map(|part| part.to_str().unwrap().to_owned()).collect();
        if module.last().is_some_and(|last| last == "mod") {
            module.pop();
        }
        if !modules.contains(&module[0]) {
            continue;
        }
        let text = without_tests(&plain(&fs::read_to_string(&file).unwrap()));
        for path in paths(&text) {
            let Some(absolute) = absolute(&module, &path) else { continue };
            let Some(first) = absolute.first() else { continue };
            let target = if modules.contains(first) { Some(first) } else { exported.get(first) };
            if let Some(target) = target.filter(|target| **target != module[0]) {
                let item = format!("{} ({})", absolute.join("::"), relative.display());
                edges.get_mut(&module[0]).unwrap().entry(target.clone()).or_default().insert(item);
            }
        }
    }
    edges
}

/// Returns the paths of the crate that a file names: in `use` trees, and inline.
fn paths(text: &str) -> Vec<String> {
    let mut paths: Vec<String> = statements(text, "use ").iter().flat_map(|tree| expanded(tree)).collect();
    for (at, _) in text.match_indices("crate::") {
        let path = text[at..].chars().take_while(|c| c.is_alphanumeric() || "_:".contains(*c)).collect();
        paths.push(path);
    }
    paths
}

/// Resolves a path to one from the crate's root. `None` for paths of other crates.
fn absolute(module: &[String], path: &str) -> Option<Vec<String>> {
    let mut segments: Vec<String> = path.split("::").map(str::to_owned).collect();
    if segments[0] == "crate" {
        segments.remove(0);
        return Some(segments);
    }
    let up = segments.iter().take_while(|segment| *segment == "super").count();
    if up == 0 || up > module.len() {
        return None;
    }
    Some(module[..module.len() - up].iter().cloned().chain(segments.split_off(up)).collect())
}

/// Returns the rest of each statement that begins with a keyword, up to its end.
fn statements(text: &str, keyword: &str) -> Vec<String> {
    let starts = text
        .match_indices(keyword)
        .filter(|(at, _)| text[..*at].chars().next_back().is_none_or(|c| c.is_whitespace() || c == ')'));
    let ended = starts.filter_map(|(at, _)| {
        let rest = &text[at + keyword.len()..];
        let end = if keyword == "mod " { rest.find([';', '{'])? } else { rest.find(';')? };
        Some(rest[..end].trim().to_owned())
    });
    ended.collect()
}

/// Lists the paths of a `use` tree, without their aliases.
fn expanded(tree: &str) -> Vec<String> {
    let tree = tree.trim();
    match tree.find('{') {
        Some(open) => {
            let inner = balanced(&tree[open..]);
            let each = split(&inner[1..inner.len() - 1]).into_iter().flat_map(|part| expanded(&part));
            each.map(|path| format!("{}{path}", &tree[..open])).collect()
        }
        None if tree.is_empty() => Vec::new(),
        None => vec![tree.split(" as ").next().unwrap().split_whitespace().collect()],
    }
}

/// Returns the text from an opening brace to the closing one.
fn balanced(text: &str) -> &str {
    let mut depth = 0;
    for (at, c) in text.char_indices() {
        match c {
            '{' | '(' | '[' => depth += 1,
            '}' | ')' | ']' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return &text[..=at];
        }
    }
    text
}

/// Splits at commas outside of brackets.
fn split(text: &str) -> Vec<String> {
    let (mut parts, mut depth) = (vec![String::new()], 0);
    for c in text.chars() {
        match c {
            '{' | '(' | '[' | '<' => depth += 1,
            '}' | ')' | ']' | '>' => depth -= 1,
            _ => {}
        }
        match c {
            ',' if depth == 0 => parts.push(String::new()),
            c => parts.last_mut().unwrap().push(c),
        }
    }
    parts
}

/// Returns the text without comments and with empty strings.
pub fn plain(text: &str) -> String {
    let (mut out, mut rest) = (String::new(), text);
    while let Some(c) = rest.chars().next() {
        let hashes = rest.strip_prefix('r').map(|raw| raw.chars().take_while(|c| *c == '#').count());
        if rest.starts_with("//") {
            rest = &rest[rest.find('\n').unwrap_or(rest.len())..];
        } else if let Some(hashes) = hashes.filter(|count| *count > 0 && rest[1 + count..].starts_with('"')) {
            let end = format!("\"{}", "#".repeat(hashes));
            let from = hashes + 2;
            rest = &rest[rest[from..].find(&end).map_or(rest.len(), |at| from + at + end.len())..];
        } else if c == '"' {
            let mut escaped = false;
            let end = rest[1..].find(|c| {
                let ends = c == '"' && !escaped;
                escaped = c == '\\' && !escaped;
                ends
            });
            rest = &rest[end.map_or(rest.len(), |end| end + 2)..];
        } else if rest.starts_with("'{'") || rest.starts_with("'}'") || rest.starts_with("'\"'") {
            rest = &rest[3..];
        } else {
            // "->" and "=>" are not brackets.
            if rest.starts_with("->") || rest.starts_with("=>") {
                rest = &rest[1..];
                out.push(' ');
                rest = &rest[1..];
                continue;
            }
            let end = rest[c.len_utf8()..].find(['/', 'r', '"', '\'', '-', '=']);
            let end = end.map_or(rest.len(), |end| c.len_utf8() + end);
            out.push_str(&rest[..end]);
            rest = &rest[end..];
        }
    }
    out
}

/// Returns the text without the items that only tests have.
pub fn without_tests(text: &str) -> String {
    let mut out = text.to_owned();
    while let Some(at) = ["#[cfg(test)]", "#[cfg(all(test"].iter().filter_map(|mark| out.find(mark)).min() {
        let after = at + balanced_attribute(&out[at..]);
        let end = out[after..].find([';', '{', ',']).map_or(out.len(), |found| {
            let found = after + found;
            if out[found..].starts_with('{') { found + balanced(&out[found..]).len() } else { found + 1 }
        });
        out.replace_range(at..end, "");
    }
    out
}

fn balanced_attribute(text: &str) -> usize {
    1 + balanced(&text[1..]).len()
}

/// Returns the files and folders of modules that only tests have.
fn test_files(root: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for file in rust_sources(root) {
        let text = fs::read_to_string(&file).unwrap();
        for named in text.split("#[cfg(test)]\n#[path = \"").skip(1) {
            found.push(file.parent().unwrap().join(named.split('"').next().unwrap()));
        }
        let text = plain(&text);
        let folder = match file.file_stem().unwrap().to_str().unwrap() {
            "mod" | "lib" | "main" => file.parent().unwrap().to_owned(),
            stem => file.parent().unwrap().join(stem),
        };
        for (at, mark) in text.match_indices("#[cfg(test)]") {
            let rest = text[at + mark.len()..].trim_start();
            let rest = rest.strip_prefix("pub(crate) ").or(rest.strip_prefix("pub ")).unwrap_or(rest);
            if let Some(name) = rest.strip_prefix("mod ").and_then(|rest| rest.split(';').next()) {
                found.push(folder.join(name.trim()));
                found.push(folder.join(format!("{}.rs", name.trim())));
            }
        }
    }
    found
}

/// Returns the sets of modules that reach each other.
fn cycles(edges: &Edges) -> Vec<Vec<String>> {
    let reached = |from: &String| {
        let (mut seen, mut open) = (BTreeSet::new(), vec![from]);
        while let Some(module) = open.pop() {
            for next in edges[module].keys() {
                if seen.insert(next.clone()) {
                    open.push(next);
                }
            }
        }
        seen
    };
    let reach: BTreeMap<&String, BTreeSet<String>> =
        edges.keys().map(|module| (module, reached(module))).collect();
    let mut found: Vec<Vec<String>> = Vec::new();
    for module in edges.keys().filter(|module| reach[module].contains(*module)) {
        if found.iter().any(|cycle| cycle.contains(module)) {
            continue;
        }
        let others = reach[module].iter().filter(|other| reach[other].contains(module));
        found.push(others.cloned().collect());
    }
    found
}

#[test]
fn a_cycle_is_found_with_its_reason() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    write(
        "lib.rs",
        "mod a;\nmod b;\nmod c;\n#[cfg(test)]\nmod tests;\npub use c::{Thing, other as Other};\n",
    );
    write("a.rs", "use crate::{b::{self, X}, Thing}; // use crate::nothing;\n");
    write("b/mod.rs", "mod inner;\n");
    write("b/inner.rs", "fn f() { super::super::a::g() }\nuse super::super::c;\n");
    write("c.rs", "#[cfg(test)]\nmod tests { use crate::a; }\nconst S: &str = \"use crate::a;\";\n");
    write("tests.rs", "use crate::a;\n");
    let edges = imports(folder.path());
    assert!(cycles(&edges).is_empty(), "{edges:?}");
    assert_eq!(edges["a"].keys().collect::<Vec<_>>(), ["b", "c"]);
    write("c.rs", "fn f() -> u8 { crate::a::g() }\n");
    assert_eq!(cycles(&imports(folder.path())), [["a", "b", "c"].map(str::to_owned).to_vec()]);
}
