//! `skep.toml` read again while a host runs: over HTTP, from the command line and by SIGHUP.

use crate::{
    config_host::{Up, changes, skep, text, until},
    durability::tiny_model,
    harness::{client, repository},
};
use futures::StreamExt as _;
use serde_json::{Value, json};
use std::{
    fs,
    io::{Read, Write},
    net::TcpListener,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

const SMALL: &str = "[[model]]\nname = \"small\"\nsource = \".\"\n";
const PRICE: &str = "cached_input = 0.1\noutput = 1.0\ncurrency = \"USD\"\nfrom = \"2020-01-01\"\n";

fn question(model: &str, max_tokens: u32) -> Value {
    let messages = json!([{"role": "user", "content": "Name a colour."}]);
    json!({"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0})
}

async fn ask(up: &Up, model: &str) -> (u16, Value) {
    up.host.post("/v1/chat/completions", question(model, 4)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn changed_settings_apply_at_once_and_a_bad_file_changes_nothing() {
    let file = |limits: &str, rates: &str, price: &str, rest: &str| {
        format!(
            "{SMALL}[limits]\n{limits}\n[tenants.default]\n{rates}\n[prices.small]\ninput = {price}\n{PRICE}\
             [grants]\nmodels = [\"small\"]\n{rest}"
        )
    };
    let first = file("tokens_per_turn = 100", "requests_per_minute = 600", "1.0", "[http]\ndrain_s = 5\n");
    let up = Up::start(&first);
    let same = up.reload(&first).await;
    assert_eq!((&same["changed"], &same["needs_restart"]), (&json!([]), &json!([])), "{same}");
    assert!(same["file"].as_str().unwrap().ends_with("skep.toml"), "{same}");
    assert_eq!(up.host.deploy_guest("generate", "one", "[limits]\ntokens_per_turn = 1000").await.0, 201);
    let (_, agent) = up.host.get("/v1/agents/one").await;
    assert_eq!(agent["limits"]["tokens_per_turn"], 100, "{agent}");

    let second = file(
        "tokens_per_turn = 50\nmemory_mb = 32",
        "requests_per_minute = 3",
        "2.0",
        "[http]\ndrain_s = 6\n[runtime]\nmailbox = 9\n",
    );
    up.write(&second);
    let reloaded = up.skep(&["config", "reload"]);
    assert!(reloaded.status.success(), "{}", text(&reloaded.stderr));
    let expected = "skep.toml: 3 changes\n\
                    \x20 [limits] tokens_per_turn: 100 → 50\n\
                    \x20 [prices.small] input: 1.0 → 2.0\n\
                    \x20 [tenants.default] requests_per_minute: 600 → 3\n\
                    needs a restart:\n\
                    \x20 [http] drain_s: 5 → 6\n\
                    \x20 [limits] memory_mb: not set → 32\n\
                    \x20 [runtime] mailbox: not set → 9\n";
    assert_eq!(text(&reloaded.stdout), expected);

    let (_, agent) = up.host.get("/v1/agents/one").await;
    assert_eq!(agent["limits"]["tokens_per_turn"], 50, "{agent}");
    assert_ne!(agent["limits"]["memory_mb"], 32, "the memory of instances is reserved at the start");
    for status in [200, 200, 200, 429] {
        assert_eq!(ask(&up, "small").await.0, status);
    }
    let usage = until(async || {
        let (_, usage) = up.host.get("/v1/usage?by=model").await;
        (usage["data"][0]["requests"] == 3).then_some(usage)
    });
    let usage = usage.await;
    let (input, output) = (&usage["data"][0]["input_tokens"], &usage["data"][0]["output_tokens"]);
    let cached = usage["data"][0]["cached_input_tokens"].as_u64().unwrap();
    let (input, output) = (input.as_u64().unwrap(), output.as_u64().unwrap());
    let micros = 2_000_000 * (input - cached) + 100_000 * cached + 1_000_000 * output;
    let cost = usage["data"][0]["cost"][0]["amount"].as_str().unwrap().parse::<f64>().unwrap();
    assert!((cost - micros as f64 / 1e12).abs() < 1e-9, "{usage}");

    // A mistake of any kind changes nothing, and names its place.
    for (bad, why) in [
        (file("tokens_per_turn = 0", "", "1.0", ""), "line 5: [limits] tokens_per_turn: 0 is out of range"),
        (file("cpu_mss = 5", "", "1.0", ""), "line 5: unknown field `cpu_mss`; did you mean `cpu_ms`?"),
        (
            file("", "", "0.01", ""),
            "[prices.\"small\"]: the prices from 2020-01-01: `cached_input` is higher",
        ),
        (
            file("", "", "1.0", "[[route]]\nname = \"r\"\n[[route.models]]\nmodel = \"smal\"\n"),
            "did you mean \"small\"?",
        ),
        (
            file(
                "",
                "",
                "1.0",
                "[[upstream]]\nname = \"u\"\nkind = \"openai\"\nurl = \"http://localhost\"\n",
            ),
            "it has no models",
        ),
        (
            file("", "", "1.0", "[[model]]\nname = \"big\"\nsource = \"/no/such/model\"\n"),
            "no model \"/no/such/model\"",
        ),
        (file("", "", "1.0", "[mcp.files]\nurl = \"x\"\n"), "[mcp.files]: url \"x\" is not a valid address"),
        ("[tenants".to_owned(), "line 1"),
    ] {
        let before = up.host.get("/v1/config").await;
        up.write(&bad);
        let (status, refused) = up.host.post("/v1/config/reload", json!(null)).await;
        let message = refused["error"]["message"].as_str().unwrap();
        assert_eq!((status, &refused["error"]["code"]), (422, &json!("invalid_config")), "{refused}");
        assert!(
            message.starts_with("skep.toml is not a valid skep.toml: ") && message.contains(why),
            "{message}"
        );
        let refused = up.skep(&["config", "reload"]);
        assert_eq!(refused.status.code(), Some(4));
        assert!(text(&refused.stderr).contains(why), "{}", text(&refused.stderr));
        assert_eq!(up.host.get("/v1/config").await, before);
    }
    let (_, agent) = up.host.get("/v1/agents/one").await;
    assert_eq!(agent["limits"]["tokens_per_turn"], 50, "{agent}");

    // A setting that needs a restart stays listed until the file says again what the host was started with.
    let back = up.reload(&first).await;
    let expected = [
        "[limits] tokens_per_turn: 50 → 100",
        "[prices.small] input: 2.0 → 1.0",
        "[tenants.default] requests_per_minute: 3 → 600",
    ];
    assert_eq!(
        (changes(&back, "changed"), &back["needs_restart"]),
        (expected.map(str::to_owned).to_vec(), &json!([]))
    );
    assert_eq!(ask(&up, "small").await.0, 200);
    let (_, metrics) = up.host.get("/metrics").await;
    for line in ["outcome=\"ok\"} 3", "outcome=\"invalid\"} 16"] {
        let line = format!("skep_config_reloads_total{{{line}");
        assert!(metrics.as_str().unwrap().contains(&line), "{line}");
    }
    let audit = up.log();
    assert!(audit.contains("config.reload") && audit.contains("changed=3 needs_restart=0"), "{audit}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signal_reloads_and_never_ends_the_host() {
    let up = Up::start(&format!("{SMALL}[tenants.default]\nrequests_per_minute = 5\n"));
    up.write(&format!("{SMALL}[tenants.default]\nrequests_per_minute = 6\n[auth]\nopen_metrics = true\n"));
    let log = up.hang_up("the configuration was reloaded").await;
    assert!(log.contains("changed: [tenants.default] requests_per_minute: 5 → 6"), "{log}");
    assert!(log.contains("needs a restart: [auth] open_metrics: not set → true"), "{log}");
    up.write("[tenants.default]\nrequests_per_minute = \"many\"\n");
    let log = up.hang_up("the configuration stays as it was").await;
    assert!(log.contains("line 2: [tenants.default] requests_per_minute: "), "{log}");
    let limit =
        client().post(up.host.at("/v1/chat/completions")).json(&question("small", 1)).send().await.unwrap();
    assert_eq!(limit.headers()["x-ratelimit-limit-requests"], "6");

    let folder = tempfile::tempdir().unwrap();
    tiny_model(folder.path());
    let without = Up::run(folder, &["--model", "small=."]);
    without.hang_up("there is nothing to reload").await;
    let (status, refused) = without.host.post("/v1/config/reload", json!(null)).await;
    assert_eq!((status, &refused["error"]["code"]), (409, &json!("no_config")), "{refused}");
    let shown = without.skep(&["config", "show"]);
    let shown = text(&shown.stdout);
    assert!(shown.starts_with("# no file") && shown.contains("model = [\"small=.\"]  # --model"), "{shown}");
    assert_eq!(ask(&without, "small").await.0, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn models_upstreams_and_routes_come_and_go() {
    let near = Up::start(SMALL);
    let near_url = near.host.at("/v1");
    let gone = crate::upstreams::nowhere();
    let broken = format!(
        "[[upstream]]\nname = \"gone\"\nkind = \"openai\"\nurl = \"{gone}\"\nattempts = 1\nbreaker_failures = 1\n\
         breaker_cool_down_ms = 600000\n[[upstream.models]]\nname = \"m\"\n"
    );
    let up = Up::start(&format!("{SMALL}{broken}"));
    assert_eq!(ask(&up, "gone/m").await.0, 503);
    assert_eq!(ask(&up, "near/small").await.0, 404);

    let second = format!(
        "[[model]]\nname = \"small\"\nsource = \".\"\naliases = [\"fast\"]\n\
         [[model]]\nname = \"big\"\nsource = \".\"\naliases = [\"smart\"]\n{broken}\
         [[upstream]]\nname = \"near\"\nkind = \"openai\"\nurl = \"{near_url}\"\n[[upstream.models]]\nname = \"small\"\n\
         [[route]]\nname = \"any\"\n[[route.models]]\nmodel = \"gone/m\"\n[[route.models]]\nmodel = \"near/small\"\n"
    );
    let answer = up.reload(&second).await;
    let changed = changes(&answer, "changed");
    for line in [
        "[[model]]: [\"small\"] → [\"small\", \"big\"]",
        "[[model]] big source: not set → \".\"",
        "[[model]] small aliases: not set → [\"fast\"]",
        &format!("[[upstream]] near url: not set → \"{near_url}\""),
        "[[upstream.models]] near: not set → [\"small\"]",
        "[[route.models]] any gone/m model: not set → \"gone/m\"",
    ] {
        assert!(changed.contains(&line.to_owned()), "{line}: {changed:#?}");
    }
    assert!(!changed.iter().any(|line| line.starts_with("[[upstream]] gone")), "{changed:#?}");
    // `load = "start"` is the default: the new model is loaded without a request.
    until(async || (up.host.get("/v1/models/big").await.1["skep"]["state"] == "loaded").then_some(())).await;
    for (asked, answered) in [
        ("fast", "small"),
        ("smart", "big"),
        ("big", "big"),
        ("near/small", "near/small"),
        ("any", "near/small"),
    ] {
        let (status, answer) = ask(&up, asked).await;
        assert_eq!((status, &answer["model"]), (200, &json!(answered)), "{asked}: {answer}");
    }
    // The circuit breaker of the upstream that did not change is still open: nothing was sent to it.
    let attempts = async || {
        let (_, metrics) = up.host.get("/metrics").await;
        let lines: Vec<String> = metrics
            .as_str()
            .unwrap()
            .lines()
            .filter(|line| line.contains("upstream=\"gone\""))
            .map(str::to_owned)
            .collect();
        let line = |name: &str| {
            lines
                .iter()
                .find(|line| line.starts_with(name))
                .expect(name)
                .rsplit(' ')
                .next()
                .unwrap()
                .to_owned()
        };
        (line("skep_upstream_attempts_total"), line("skep_upstream_breaker_state"))
    };
    assert_eq!(attempts().await, ("1".to_owned(), "2".to_owned()));

    // An alias is re-pointed, the default changes, and a model, an upstream and a route are removed.
    let third = "[[model]]\nname = \"big\"\nsource = \".\"\naliases = [\"smart\", \"fast\"]\n";
    let answer = up.reload(third).await;
    assert_eq!(ask(&up, "fast").await.1["model"], "big");
    assert_eq!(ask(&up, "default").await.1["model"], "big");
    for name in ["small", "near/small", "gone/m", "any"] {
        assert_eq!(ask(&up, name).await.0, 404, "{name}: {answer}");
    }
    let (_, models) = up.host.get("/v1/models").await;
    assert_eq!(models["data"].as_array().unwrap().len(), 1, "{models}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_ends_with_the_model_and_the_limits_with_which_it_began() {
    const TOKENS: usize = 2_500;
    let up = Up::start(&format!("{SMALL}[tenants.default]\nrequests_per_minute = 100\n"));
    let mut body = question("small", TOKENS as u32);
    (body["stream"], body["ignore_eos"]) = (json!(true), json!(true));
    let answer = client().post(up.host.at("/v1/chat/completions")).json(&body).send().await.unwrap();
    assert_eq!(answer.status(), 200);
    let mut stream = answer.bytes_stream();
    let mut received = stream.next().await.expect("a first part").unwrap().to_vec();
    let reloaded = up
        .reload("[[model]]\nname = \"small\"\nsource = \".\"\ncontext = 1024\n[tenants.default]\nrequests_per_minute = 1\n")
        .await;
    assert_eq!(
        changes(&reloaded, "changed"),
        ["[[model]] small context: not set → 1024", "[tenants.default] requests_per_minute: 100 → 1"]
    );
    assert!(!text(&received).contains("[DONE]"), "the stream runs while the settings change");
    let (_, model) = up.host.get("/v1/models/small").await;
    assert_ne!(model["skep"]["state"], "unloading", "requests get the new model: {model}");
    while let Some(part) = stream.next().await {
        received.extend(part.unwrap());
    }
    let chunks: Vec<Value> = text(&received)
        .lines()
        .filter_map(|line| serde_json::from_str(line.strip_prefix("data: ")?).ok())
        .collect();
    let last = chunks.last().unwrap();
    assert_eq!(last["choices"][0]["finish_reason"], "length", "{last}");
    assert!(text(&received).trim_end().ends_with("[DONE]"));
    until(async || (up.host.get("/v1/models/small").await.1["context_length"] == 1024).then_some(())).await;
}

/// Starts a receiver of webhooks, which counts what it gets.
fn receiver() -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/hook", listener.local_addr().unwrap());
    let count = Arc::new(AtomicUsize::new(0));
    let counted = count.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let (mut seen, mut bytes) = (Vec::new(), [0; 4096]);
            while !seen.ends_with(b"}") {
                match stream.read(&mut bytes).unwrap_or(0) {
                    0 => break,
                    count => seen.extend_from_slice(&bytes[..count]),
                }
            }
            counted.fetch_add(1, Ordering::SeqCst);
            let _ = stream.write_all(b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n");
        }
    });
    (url, count)
}

#[tokio::test(flavor = "multi_thread")]
async fn grants_tool_servers_and_webhooks_change_and_what_stays_is_not_disturbed() {
    let ((one, got_one), (two, got_two)) = (receiver(), receiver());
    let script = repository().join("examples/mcp-both-ways/server.py");
    let library = |token: &str| {
        format!(
            "[mcp.library]\ncommand = [\"python3\", {script:?}, \"--key=sesame\"]\nenv = {{ TOKEN = \"{token}\" }}\n"
        )
    };
    let hook = |url: &str, topic: &str| {
        format!(
            "[[webhook]]\nurl = \"{url}\"\ntopics = [\"{topic}\"]\nsecret = \"whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\"\n"
        )
    };
    let base = format!("{SMALL}[outbound]\nallow_private = [\"127.0.0.0/8\"]\n");
    let up = Up::start(&base);
    let grants = "[grants]\ntools = [\"mcp:library/*\"]";
    let (_, deployed) = up.host.deploy_guest("relay", "desk", grants).await;
    let warnings = deployed["warnings"].to_string();
    assert!(warnings.contains("skep.toml has no MCP server \\\"library\\\""), "{deployed}");
    let find = async |session: &str| {
        let (_, answer) =
            up.host.message("desk", session, r#"mcp:library/find_book {"title": "Emma"}"#).await;
        answer["text"].as_str().unwrap_or_else(|| panic!("{answer}")).to_owned()
    };
    assert!(find("a").await.contains("under [grants] in skep.toml"));

    let granted = format!("{base}[grants]\ntools = [\"mcp:libary/*\"]\n");
    let misspelt = up.reload(&format!("{granted}{}", library("a"))).await;
    assert!(
        misspelt["warnings"][0]
            .as_str()
            .unwrap()
            .contains("there is no [mcp.libary]; did you mean \"library\"?"),
        "{misspelt}"
    );
    let shown = misspelt.to_string();
    assert!(!shown.contains("sesame") && !shown.contains("TOKEN: not set → \"a\""), "{shown}");
    assert!(find("b").await.contains("under [grants] in skep.toml"));
    let granted = granted.replace("libary", "library");
    let hooks = hook(&one, "order.*");
    let answer = up.reload(&format!("{granted}{}{hooks}", library("a"))).await;
    assert_eq!(answer["warnings"], json!([]), "{answer}");
    assert!(!answer.to_string().contains("MfKQ"), "{answer}");
    assert_eq!(find("c").await, "{\"shelf\":12}");
    let server = up.servers();
    assert_eq!(server.len(), 1);
    let publish =
        async || assert_eq!(up.host.post("/v1/events", json!({"topic": "order.paid"})).await.0, 202);
    publish().await;
    until(async || (got_one.load(Ordering::SeqCst) == 1).then_some(())).await;

    // A price is another section: the server and the webhook stay.
    let before = up.host.get("/v1/webhooks").await.1["data"][0].clone();
    let price = format!("[prices.small]\ninput = 1.0\n{PRICE}");
    up.reload(&format!("{granted}{}{hooks}{price}", library("a"))).await;
    assert_eq!((find("d").await, up.servers()), ("{\"shelf\":12}".to_owned(), server.clone()));
    assert_eq!(up.host.get("/v1/webhooks").await.1["data"][0]["created_at_ms"], before["created_at_ms"]);

    // The environment of the server changes, so it is started again; the webhook goes to another address.
    let answer = up.reload(&format!("{granted}{}{}{price}", library("b"), hook(&two, "order.*"))).await;
    let changed = changes(&answer, "changed");
    assert!(changed.contains(&"[mcp.library.env] TOKEN: changed".to_owned()), "{changed:#?}");
    assert_eq!(find("e").await, "{\"shelf\":12}");
    let restarted = until(async || Some(up.servers()).filter(|now| now.len() == 1 && *now != server)).await;
    publish().await;
    until(async || (got_two.load(Ordering::SeqCst) == 1).then_some(())).await;
    assert_eq!(got_one.load(Ordering::SeqCst), 1, "nothing is sent to the address that was removed");

    let shown = up.skep(&["config", "show"]);
    let shown = text(&shown.stdout);
    for hidden in ["MfKQ", "sesame", "TOKEN = \"b\""] {
        assert!(!shown.contains(hidden), "{shown}");
    }
    assert!(shown.contains("secret = (hidden)") && shown.contains("TOKEN = (hidden)"), "{shown}");
    assert!(shown.contains("listen = \"127.0.0.1:0\"  # --listen"), "{shown}");

    // Everything is removed again.
    up.reload(&base).await;
    assert!(find("f").await.contains("under [grants] in skep.toml"));
    until(async || up.servers().is_empty().then_some(())).await;
    assert_ne!(restarted, server);
    assert_eq!(up.host.get("/v1/webhooks").await.1["data"], json!([]));
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_names_are_warnings_everywhere() {
    let folder = tempfile::tempdir().unwrap();
    tiny_model(folder.path());
    let file = folder.path().join("skep.toml");
    let path = file.to_str().unwrap();
    let price = "input = 1\ncached_input = 1\noutput = 1\ncurrency = \"USD\"\nfrom = \"2020-01-01\"\n";
    let toml = format!(
        "{SMALL}aliases = [\"little\"]\n[grants]\nmodels = [\"smal\", \"gpt-4\", \"*\", \"far/*\", \"sm*\"]\ntools = [\"mcp:files/*\", \"agent:later/*\"]\n\
         [tenants.acme]\nmodels = [\"small\", \"big\"]\n[prices.smal]\n{price}[prices.little]\n{price}"
    );
    fs::write(&file, &toml).unwrap();
    let expected = [
        "[grants] models: \"smal\" is neither a model nor an alias of this host; did you mean \"small\"?",
        "[grants] models: \"gpt-4\" is neither a model nor an alias of this host",
        "[grants] models: \"far/*\" grants the models of the upstream \"far\", which does not exist",
        "[grants] models: \"sm*\" grants nothing; \"*\" means all local models, and \"NAME/*\" those of an upstream",
        "[tenants.acme] models: \"big\" is neither a model nor an alias of this host",
        "[grants] tools: \"mcp:files/*\" grants tools of the MCP server \"files\", and there is no [mcp.files]",
        "[prices.\"little\"] is for an alias and is not used; set [prices.\"small\"] instead",
        "[prices.\"smal\"] is for a model that this host does not serve; did you mean \"small\"?",
    ];
    let checked = Command::new(env!("CARGO_BIN_EXE_skep"))
        .args(["config", "check"])
        .current_dir(folder.path())
        .env("NO_COLOR", "1")
        .output()
        .unwrap();
    let said: Vec<&str> =
        text(&checked.stderr).lines().map(|line| line.strip_prefix("warning: ").expect(line)).collect();
    assert_eq!(said, expected);
    assert_eq!(
        (checked.status.code(), text(&checked.stdout)),
        (Some(0), "skep.toml is valid, with 8 warnings\n")
    );

    fs::write(&file, "[limits]\nmemroy_mb = 1\n").unwrap();
    let checked = skep(&["config", "check", path], &[]);
    assert_eq!(checked.status.code(), Some(1));
    assert!(text(&checked.stderr).contains("line 2: unknown field `memroy_mb`; did you mean `memory_mb`?"));
    fs::write(&file, "listen = \"0.0.0.0:1\"\n[auth]\nrequired = false\n").unwrap();
    assert!(text(&skep(&["config", "check", path], &[]).stderr).contains("anyone who can connect"));

    fs::write(&file, &toml).unwrap();
    let up = Up::run(folder, &["--config", "skep.toml"]);
    let log = up.log();
    assert!(expected.iter().all(|warning| log.contains(warning)), "{log}");
    // A running host knows its agents, too.
    let later =
        "[grants] tools: \"agent:later/*\" grants tools of the agent \"later\", which is not deployed";
    assert!(log.contains(later), "{log}");
    let (_, again) = up.host.post("/v1/config/reload", json!(null)).await;
    let expected: Vec<&str> = expected.into_iter().chain([later]).collect();
    assert_eq!(again["warnings"], json!(expected), "{again}");

    assert_eq!(up.host.deploy_guest("relay", "concierge", "model = \"small\"").await.0, 201);
    let created = up.skep(&["key", "create", "--role", "invoke", "--agents", "conceirge,concierge,nope"]);
    assert!(created.status.success() && text(&created.stdout).starts_with("skep_"));
    let said = text(&created.stderr);
    assert!(
        said.contains("warning: agent \"conceirge\" is not deployed; did you mean \"concierge\"?"),
        "{said}"
    );
    assert!(
        said.contains("agent \"nope\" is not deployed;") && !said.contains("agent \"concierge\""),
        "{said}"
    );
    let new = json!({"tenant": "local", "role": "invoke", "agents": ["nope"]});
    let (status, key) = up.host.post("/v1/keys", new).await;
    assert!(status == 201 && key["warnings"][0].as_str().unwrap().contains("\"nope\""), "{key}");
    let new = json!({"tenant": "local", "role": "invoke", "agents": ["concierge"]});
    assert_eq!(up.host.post("/v1/keys", new).await.1.get("warnings"), None);

    // An agent whose model is taken away is named, and works again when the model is back.
    let other = toml.replace("name = \"small\"", "name = \"other\"");
    let answer = up.reload(&other).await;
    let lost = "agent concierge generates with the model \"small\", which this host does not serve anymore";
    assert!(
        answer["warnings"]
            .as_array()
            .unwrap()
            .iter()
            .any(|warning| warning.as_str().unwrap().starts_with(lost)),
        "{answer}"
    );
    let answer = up.reload(&toml).await;
    assert_eq!(answer["warnings"], json!(expected), "{answer}");

    // Agents that are not deployed, and tenants that look like misspelled ones.
    assert_eq!(up.host.post("/v1/keys", json!({"tenant": "acme", "role": "invoke"})).await.0, 201);
    let more = format!(
        "{toml}[tenants.acmee]\nweight = 2\n[tenants.other]\nweight = 2\n[agents.conceirge]\nweight = 2\n\
         [[route]]\nname = \"smart\"\n[[route.models]]\nmodel = \"small\"\ntenants = [\"acm\", \"acme\", \"other\"]\n"
    );
    let answer = up.reload(&more).await;
    let misspelled = [
        "[agents.conceirge] is for an agent that is not deployed; did you mean \"concierge\"?",
        "[tenants.acmee]: no tenant has this name; did you mean \"acme\"?",
        "[[route]] smart: no tenant has the name \"acm\"; did you mean \"acme\"?",
    ];
    let expected: Vec<&str> = expected.into_iter().chain(misspelled).collect();
    assert_eq!(answer["warnings"], json!(expected), "{answer}");
}
