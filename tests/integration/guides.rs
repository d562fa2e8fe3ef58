//! The guides: every shell block runs as it stands, in the order of its page. The Rust blocks are doc tests of `tests/guests`, and
//! settings are parsed.
//!
//! Each page has an empty folder as its home and its working folder, and where the system allows it a network of its own, so
//! that its host can listen on the default port. What the words after a fence's language mean is in `.github/CONTRIBUTING.md`.

use crate::{harness::repository, postgres_server::Server};
use skep_cli::config::Config;
use skep_runtime::Manifest;
use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{LazyLock, Mutex, PoisonError},
};

/// Why a block may be skipped.
const REASONS: [&str; 5] = ["gpu", "root", "cluster", "network", "secret"];
const FOLDERS: [&str; 2] = ["guest-sdk/guide", "host/guide"];
/// Pages whose commands download packages, which a network of their own would prevent.
const DOWNLOADS: [&str; 2] = ["javascript", "python"];
/// Databases of a PostgreSQL server that a page gets if it uses these variables.
const DATABASES: [(&str, &str); 2] = [("DATABASE", "skep"), ("NEW_DATABASE", "skep_new")];
/// Programs whose commands belong into blocks that run.
const PROGRAMS: [&str; 24] = [
    "apt-get",
    "bash",
    "cargo",
    "cat",
    "cd",
    "cp",
    "createdb",
    "curl",
    "docker",
    "echo",
    "export",
    "git",
    "jq",
    "kill",
    "ln",
    "mkdir",
    "npm",
    "openssl",
    "pip",
    "podman",
    "psql",
    "skep",
    "sudo",
    "systemctl",
];
/// Time within which a block has to end. A build may wait for several of other pages and of the copies of examples, because they
/// share a folder.
const BLOCK_SECONDS: u32 = 1_200;

/// A fenced block of a page.
struct Block {
    /// Line of the fence, counted from 1.
    line: usize,
    words: Vec<String>,
    text: String,
}

impl Block {
    fn is(&self, language: &str) -> bool {
        self.words.first().is_some_and(|word| word == language)
    }

    fn has(&self, word: &str) -> bool {
        self.words.iter().skip(1).any(|known| known == word)
    }

    fn value(&self, key: &str) -> Option<&str> {
        self.words.iter().find_map(|word| word.strip_prefix(key)?.strip_prefix('='))
    }
}

fn pages() -> Vec<PathBuf> {
    let folders = FOLDERS.iter().map(|folder| repository().join(folder));
    let files = folders.flat_map(|folder| fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()));
    let mut pages: Vec<PathBuf> =
        files.filter(|path| path.extension().is_some_and(|ext| ext == "md")).collect();
    pages.sort();
    pages
}

fn blocks(page: &Path) -> Vec<Block> {
    let mut blocks = Vec::new();
    let mut open: Option<(Block, String)> = None;
    for (index, line) in fs::read_to_string(page).unwrap().lines().enumerate() {
        let fence: String = line.trim_start().chars().take_while(|c| *c == '`').collect();
        match open.take() {
            None if fence.len() >= 3 => {
                let info = line.trim_start().trim_start_matches('`');
                let words = info.replace(',', " ").split_whitespace().map(str::to_owned).collect();
                open = Some((Block { line: index + 1, words, text: String::new() }, fence));
            }
            None => {}
            Some((block, end)) if line.trim() == end => blocks.push(block),
            Some((mut block, end)) => {
                block.text.push_str(line);
                block.text.push('\n');
                open = Some((block, end));
            }
        }
    }
    assert!(open.is_none(), "{}: a fence is not closed", page.display());
    blocks
}

/// Whether pages can have a network of their own, and the command that gives them one.
static NETWORK: LazyLock<Option<&'static [&'static str]>> = LazyLock::new(|| {
    let works = |command: &&'static [&'static str]| {
        let probe =
            Command::new(command[0]).args(&command[1..]).args(["ip", "link", "set", "lo", "up"]).output();
        probe.is_ok_and(|output| output.status.success())
    };
    [&["unshare", "-n"][..], &["unshare", "-rn"]].into_iter().find(works)
});

/// Pages that share the machine's network, and with it the default port, run one after the other.
static SHARED_NETWORK: Mutex<()> = Mutex::new(());

/// Runs a page. Panics with the output of the block that failed.
fn run(folder: &str, name: &str) {
    let page = repository().join(folder).join(name).with_extension("md");
    let scratch = tempfile::tempdir().unwrap();
    let (work, cache) = (scratch.path().join("work"), scratch.path().join("cache"));
    for made in [&work, &cache, &scratch.path().join("home")] {
        fs::create_dir_all(made).unwrap();
    }
    for kept in ["models", "toolchain"] {
        let folder = skep_cli::paths::cache_subdir(kept).unwrap();
        std::os::unix::fs::symlink(folder, cache.join(kept)).unwrap();
    }
    let text = fs::read_to_string(&page).unwrap();
    let uses_examples = blocks(&page).iter().any(|block| block.is("sh") && block.text.contains("examples/"));
    if uses_examples {
        std::os::unix::fs::symlink(repository().join("examples"), work.join("examples")).unwrap();
    }
    let script = scratch.path().join("page.sh");
    fs::write(&script, script_of(&page, &work)).unwrap();

    let server = if text.contains("\"$DATABASE\"") {
        let Some(server) = Server::start() else { return };
        server.execute("CREATE DATABASE skep");
        server.execute("CREATE DATABASE skep_new");
        Some(server)
    } else {
        None
    };
    let own_network = NETWORK.filter(|_| !DOWNLOADS.contains(&name));
    let _alone = own_network.is_none().then(|| SHARED_NETWORK.lock().unwrap_or_else(PoisonError::into_inner));
    let mut command = match own_network {
        Some(wrapper) => {
            let mut command = Command::new(wrapper[0]);
            command.args(&wrapper[1..]).arg("bash");
            command
        }
        None => Command::new("bash"),
    };
    let skep = Path::new(env!("CARGO_BIN_EXE_skep")).parent().unwrap();
    let path = format!("{}:{}", skep.display(), std::env::var("PATH").unwrap());
    // Other tests have built the examples; the crates that pages make share the builds of their dependencies.
    let builds = skep.parent().unwrap();
    let target = if uses_examples { builds.to_owned() } else { builds.join("guides") };
    let home = std::env::var("HOME").unwrap_or_default();
    let folders = [
        ("CARGO_HOME", ".cargo"),
        ("RUSTUP_HOME", ".rustup"),
        ("XDG_CACHE_HOME", ".cache"),
        ("PYENV_ROOT", ".pyenv"),
        ("npm_config_cache", ".npm"),
    ];
    for (variable, folder) in folders {
        command.env(variable, std::env::var(variable).unwrap_or_else(|_| format!("{home}/{folder}")));
    }
    if own_network.is_some() {
        command.env("CARGO_NET_OFFLINE", "true");
    }
    for (variable, database) in DATABASES {
        command.envs(server.as_ref().map(|server| (variable, server.socket_url(database))));
    }
    let output = command
        .arg(&script)
        .current_dir(&work)
        .env("HOME", scratch.path().join("home"))
        .env("SKEP_HOME", &cache)
        .env("PATH", path)
        .env("CARGO_TARGET_DIR", target)
        .env("NO_COLOR", "1")
        .env("TERM", "dumb")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let (said, complaint) = (said.trim_end(), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}\n{said}\n{complaint}", page.display());
}

/// Writes the blocks of a page as one script.
fn script_of(page: &Path, work: &Path) -> String {
    let mut script = format!(
        r#"
ip link set lo up 2>/dev/null || true
running=()
finish() {{
    status=$?
    for one in "${{running[@]}}"; do kill -TERM -- "-$one" 2>/dev/null || true; done
    for one in "${{running[@]}}"; do
        for _ in $(seq 300); do kill -0 -- "-$one" 2>/dev/null || break; sleep 0.1; done
        kill -KILL -- "-$one" 2>/dev/null || true
    done
    exit $status
}}
trap finish EXIT
block() {{ timeout {BLOCK_SECONDS} bash -euo pipefail "$1" >"$1.out" 2>&1 </dev/null; }}
failed() {{ echo "line $1: status $2"; tail -c 4000 "$3.out"; exit 1; }}
"#
    );
    for block in blocks(page) {
        let (line, file) = (block.line, work.parent().unwrap().join(format!("block-{}.sh", block.line)));
        if let Some(path) = block.value("file") {
            let copy = file.with_extension("file");
            fs::write(&copy, &block.text).unwrap();
            let folder = Path::new(path).parent().map_or(".".into(), |folder| folder.display().to_string());
            let folder = if folder.is_empty() { ".".to_owned() } else { folder };
            writeln!(script, "mkdir -p '{folder}' && cp '{}' '{path}'", copy.display()).unwrap();
            continue;
        }
        if !block.is("sh") || block.value("skip").is_some() {
            continue;
        }
        fs::write(&file, &block.text).unwrap();
        let path = file.display();
        if block.has("background") {
            writeln!(
                script,
                "setsid bash -euo pipefail '{path}' >'{path}.out' 2>&1 </dev/null & running+=($!)"
            )
            .unwrap();
            let is_ready = if block.text.contains("skep up") {
                let listen = block.text.split_whitespace().skip_while(|word| *word != "--listen").nth(1);
                format!("curl -sf -o /dev/null http://{}/readyz", listen.unwrap_or("127.0.0.1:8080"))
            } else {
                format!("(exec 3<>/dev/tcp/127.0.0.1/{}) 2>/dev/null", port_of(&block, page))
            };
            writeln!(
                script,
                "for _ in $(seq 1800); do {is_ready} && break; kill -0 $! 2>/dev/null || failed {line} ended '{path}'; \
                 sleep 0.1; done; {is_ready} || failed {line} 'not ready' '{path}'"
            )
            .unwrap();
        } else if block.has("fails") {
            writeln!(script, "if block '{path}'; then failed {line} '0, though it should fail' '{path}'; fi")
                .unwrap();
        } else {
            writeln!(script, "block '{path}' || failed {line} $? '{path}'").unwrap();
        }
    }
    script
}

/// Returns the port of the small server that a block starts, whose program is another block of the page.
fn port_of(starts: &Block, page: &Path) -> u16 {
    let (blocks, file) = (blocks(page), starts.text.split_whitespace().next_back().expect("a command"));
    let program = blocks.iter().find(|block| block.value("file") == Some(file));
    let place = program.and_then(|program| program.text.split("(\"127.0.0.1\", ").nth(1)?.split(')').next());
    let port = place.and_then(|port| port.parse().ok());
    port.unwrap_or_else(|| panic!("{}:{}: it is not known where it listens", page.display(), starts.line))
}

macro_rules! pages {
    ($($module:ident in $folder:literal: $($test:ident = $page:literal),* $(,)?;)*) => {
        $(mod $module {
            $(#[test]
            fn $test() {
                super::run($folder, $page);
            })*
        })*

        const TESTED: &[(&str, &str)] = &[$($(($folder, $page),)*)*];
    };
}

pages! {
    sdk in "guest-sdk/guide":
        first_agent = "first-agent",
        instructions = "instructions",
        agent_toml = "agent-toml",
        tools = "tools",
        structured_output = "structured-output",
        state_and_sessions = "state-and-sessions",
        schedules = "schedules",
        events = "events",
        approvals = "approvals",
        agents_that_call_agents = "agents-that-call-agents",
        http_and_secrets = "http-and-secrets",
        testing = "testing",
        javascript = "javascript",
        python = "python",
        any_language = "any-language";
    host in "host/guide":
        install = "install",
        configuration = "configuration",
        models = "models",
        upstreams = "upstreams",
        gpus_and_ranks = "gpus-and-ranks",
        http_api = "http-api",
        api_fields = "api-fields",
        clients = "clients",
        cluster = "cluster",
        asynchronous_batches = "asynchronous-batches",
        console = "console",
        responses = "responses",
        mcp = "mcp",
        structured_output_quality = "structured-output-quality",
        reasoning_and_tools = "reasoning-and-tools",
        tenants_and_keys = "tenants-and-keys",
        overview = "README",
        usage = "usage",
        requests = "requests",
        security_model = "security-model",
        limits = "limits",
        operations = "operations",
        kv_on_disk = "kv-on-disk",
        databases = "databases",
        backup_and_upgrade = "backup-and-upgrade";
}

#[test]
fn every_page_has_a_test_and_few_blocks_are_skipped() {
    let (mut all, mut skipped) = (0, 0);
    for page in pages() {
        let name = page.file_stem().unwrap().to_str().unwrap().to_owned();
        let folder = page.parent().unwrap().strip_prefix(repository()).unwrap().to_str().unwrap().to_owned();
        let has_blocks = blocks(&page).iter().any(|block| block.is("sh"));
        assert!(
            TESTED.contains(&(&*folder, &*name)) || !has_blocks,
            "{} has no test; add it to the list in tests/integration/guides.rs",
            page.display()
        );
        for block in blocks(&page).iter().filter(|block| block.is("sh") || block.is("rust")) {
            all += 1;
            if let Some(reason) = block.value("skip") {
                assert!(REASONS.contains(&reason), "{}:{}: {reason}", page.display(), block.line);
                skipped += 1;
            }
            assert!(
                !block.has("ignore") || block.value("file").is_some(),
                "{}:{}: say why it is skipped",
                page.display(),
                block.line
            );
        }
    }
    assert!(all > 60 && skipped * 20 < all, "{skipped} of {all} blocks are skipped");
}

/// A command in a block of output would be neither run nor noticed.
#[test]
fn output_contains_no_commands() {
    let mut faults = Vec::new();
    for page in pages() {
        for block in blocks(&page).iter().filter(|block| block.is("text") || block.words.is_empty()) {
            for line in block.text.lines().filter(|line| is_command(line)) {
                faults.push(format!("{}:{}: put {line:?} into an `sh` block", page.display(), block.line));
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// Returns whether a line of a block begins with a command rather than with the name of a program in a sentence.
fn is_command(line: &str) -> bool {
    if line.starts_with("$ ") || line.starts_with("# apt") {
        return true;
    }
    let mut words = line.split(' ');
    let program = words.next().is_some_and(|word| PROGRAMS.contains(&word));
    let argument = words.next().unwrap_or_default();
    let is_sentence =
        argument.is_empty() || argument == "is" || argument.starts_with(|c: char| c.is_ascii_digit());
    program && !is_sentence
}

#[test]
fn commands_are_distinguished_from_output() {
    let commands = ["skep kv status", "$ ls", "curl -s localhost", "mkdir a && cd a", "export A=1"];
    assert!(commands.iter().all(|line| is_command(line)));
    let outputs =
        ["skep is up at http://127.0.0.1:8080", "skep 0.1.0", "  cargo test", "error: cd", "ada", "…"];
    assert!(!outputs.iter().any(|line| is_command(line)));
}

/// Blocks that are written to a file run with their page; those that are only shown are parsed here.
#[test]
fn settings_and_json_in_the_guides_are_valid() {
    let (mut faults, mut count) = (Vec::new(), 0);
    for page in pages() {
        for block in blocks(&page) {
            let place = format!("{}:{}", page.display(), block.line);
            let name = block.value("file").and_then(|path| path.rsplit('/').next());
            if block.is("json") && name.is_none() {
                count += 1;
                let parsed = serde_json::from_str::<serde_json::Value>(&block.text);
                faults.extend(parsed.err().map(|error| format!("{place}: {error}")));
            }
            if block.is("toml") && name.is_none_or(|name| name == "skep.toml" || name == "agent.toml") {
                count += 1;
                let host = Config::parse(&block.text).err().filter(|_| name != Some("agent.toml"));
                let has_name = block.text.lines().any(|line| line.starts_with("name = "));
                let manifest =
                    if has_name { block.text.clone() } else { format!("name = \"x\"\n{}", block.text) };
                let agent = Manifest::from_toml(&manifest).err();
                match (name, host, agent) {
                    (Some("skep.toml"), Some(error), _) => faults.push(format!("{place}: {error:#}")),
                    (Some("agent.toml"), _, Some(error)) => faults.push(format!("{place}: {error}")),
                    (None, Some(host), Some(agent)) => {
                        faults.push(format!(
                            "{place}: neither a skep.toml ({host:#}) nor an agent.toml ({agent})"
                        ));
                    }
                    _ => {}
                }
            }
        }
    }
    assert!(count > 30, "found only {count} blocks");
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// A mistake in a file for another program would only be found by who uses it.
#[test]
fn yaml_in_the_guides_is_well_formed() {
    let (mut faults, mut count) = (Vec::new(), 0);
    for page in pages() {
        for block in blocks(&page).iter().filter(|block| block.is("yaml")) {
            count += 1;
            let wrong = malformed_yaml(&block.text).into_iter();
            faults.extend(wrong.map(|line| format!("{}:{}: {line:?}", page.display(), block.line)));
        }
    }
    assert!(count > 0, "found no block");
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// Returns the lines that are not of the simple form that the guides use: entries of mappings and of lists, two spaces
/// deeper than the entry that they belong to, each key once, and each alias after its anchor.
fn malformed_yaml(text: &str) -> Vec<&str> {
    let (mut wrong, mut open, mut anchors) = (Vec::new(), Vec::<(usize, Vec<&str>)>::new(), Vec::new());
    // Whether the last line was a key without a value, so that the next one may be deeper.
    let mut may_deepen = true;
    for line in text.lines().filter(|line| !line.trim().is_empty() && !line.trim_start().starts_with('#')) {
        let entry = line.trim_start();
        let depth = line.len() - entry.len();
        let deepest = open.last().map_or(0, |(depth, _)| *depth);
        let is_deeper = open.is_empty() || depth > deepest;
        let is_aligned = match is_deeper {
            true => may_deepen && depth == if open.is_empty() { 0 } else { deepest + 2 },
            false => open.iter().any(|(known, _)| *known == depth),
        };
        open.retain(|(known, _)| *known <= depth);
        if is_deeper {
            open.push((depth, Vec::new()));
        }
        let item = entry.strip_prefix("- ");
        let pair = entry.split_once(": ").or_else(|| Some((entry.strip_suffix(':')?, "")));
        let value = item.unwrap_or_else(|| pair.map_or("", |(_, value)| value)).trim();
        let keys = open.last_mut().map(|(_, keys)| keys);
        let is_new = match (item, pair, keys) {
            (None, Some((key, _)), Some(keys)) => {
                let is_new = !keys.contains(&key);
                keys.push(key);
                is_new && !key.is_empty() && !key.contains(' ')
            }
            (item, ..) => item.is_some(),
        };
        anchors.extend(value.strip_prefix('&'));
        let is_known = value.strip_prefix('*').is_none_or(|alias| anchors.contains(&alias));
        let is_closed = value.matches(['[', ']', '"']).count() % 2 == 0;
        if !is_aligned || !is_new || !is_known || !is_closed || line.contains('\t') {
            wrong.push(line);
        }
        may_deepen = value.is_empty() || value.starts_with('&');
    }
    wrong
}

#[test]
fn malformed_yaml_is_found() {
    let good = "a: &x\n  b: 1\n  c:\n    - [\"d\", \"e\"]\n    - f: g\nh:\n  <<: *x\n# note\ni:\n";
    assert!(malformed_yaml(good).is_empty(), "{:?}", malformed_yaml(good));
    for (text, wrong) in [
        ("a: 1\n  b: 2\n", "  b: 2"),
        ("a:\n   b: 2\n", "   b: 2"),
        ("a:\n  b: 1\n  b: 2\n", "  b: 2"),
        ("a:\n\tb: 1\n", "\tb: 1"),
        ("a: *x\n", "a: *x"),
        ("a: [\"b\", \"c]\n", "a: [\"b\", \"c]"),
        ("a:\n  plain\n", "  plain"),
    ] {
        assert_eq!(malformed_yaml(text), [wrong], "{text}");
    }
}

/// A page whose Rust blocks are not compiled with a package that it writes is in the list of doc tests.
#[test]
fn rust_in_the_guides_is_compiled() {
    let tests = fs::read_to_string(repository().join("tests/guests/src/lib.rs")).unwrap();
    for page in pages() {
        let shown = |block: &Block| block.is("rust") && block.value("file").is_none();
        let path = page.strip_prefix(repository()).unwrap().display().to_string();
        let is_listed = tests.contains(&format!("include_str!(\"../../../{path}\")"));
        assert!(
            is_listed || !blocks(&page).iter().any(shown),
            "{path}: add the page to tests/guests/src/lib.rs"
        );
    }
}
