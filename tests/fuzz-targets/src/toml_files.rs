//! The files `agent.toml` and `skep.toml`.

use skep_cli::{config::Config, server_options::ServerOptions};
use skep_runtime::Manifest;

pub(crate) const WORDS: &[&str] = &[
    "[limits]\n",
    "[grants]\n",
    "[sessions]\n",
    "[[schedule]]\n",
    "[[trigger.http]]\n",
    "[[trigger.event]]\n",
    "name = ",
    "hosts = [\"*\"]\n",
    "cron = \"* * * * *\"\n",
    "every = \"1m\"\n",
    "session = \"{data.id}\"\n",
    "ttl_h = 1\n",
    "[engine]\n",
    "[auth]\n",
    "[http]\n",
    "[tenants.a]\n",
    "[mcp.x]\n",
    "command = [\"x\"]\n",
    "[[webhook]]\n",
    "url = \"https://a\"\n",
    "listen = \"127.0.0.1:0\"\n",
    "\"\"\"",
    "'''",
    "= [",
    "= {",
    ".",
    "1979-05-27T07:32:00Z",
    "0x7fffffff",
    "nan",
    "99999999999999999999",
];

pub(crate) fn agent(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    if let Ok(manifest) = Manifest::from_toml(text) {
        let _ = format!("{manifest:?}");
    }
}

pub(crate) fn skep(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    if let Ok(config) = Config::parse(text) {
        let mut options = ServerOptions::default();
        if let Err(error) = config.apply(&mut options) {
            let _ = format!("{error:#}");
        }
    }
}

pub(crate) fn agent_seeds() -> Vec<Vec<u8>> {
    let whole = r#"name = "shop"
description = "Sells things"
model = "default"

[limits]
cpu_ms = 1000
turn_ms = 60_000
concurrent_turns = 3

[sessions]
ttl_h = 24
compaction = "off"

[grants]
models = ["tiny"]
tools = ["agent:*/*", "mcp:files/read"]
hosts = ["https://api.example.com", "http://*.test:8080"]
secrets = [{ name = "TOKEN", hosts = ["https://api.example.com"] }]
clocks = true
random = true

[[trigger.http]]
method = "GET"
route = "/shop/{session}/items"

[[trigger.event]]
topic = "order.*"
session = "order-{data.order_id}"

[[schedule]]
name = "nightly"
cron = "0 3 * * 1-5"
time_zone = "Europe/Berlin"
session = "s"
data = { a = [1, 2.5, true] }
tries = 3

[[schedule]]
name = "often"
every = "15m"
session = "s"

[tools.buy]
needs_approval = true
"#;
    let mut seeds = vec![whole.as_bytes().to_vec(), b"name = \"x\"\n".to_vec()];
    for agent in ["hello", "concierge"] {
        let path = format!("{}/../../examples/{agent}/agent.toml", env!("CARGO_MANIFEST_DIR"));
        seeds.extend(std::fs::read(path));
    }
    seeds
}

pub(crate) fn skep_seeds() -> Vec<Vec<u8>> {
    let whole = r#"listen = "127.0.0.1:8420"
data = "data"
durability = "process"
standby = true
model = "default"
device = "auto"
threads = 2

[engine]
replicas = 2
routing = "affinity"
max_queue = 100
kv_tokens = 4096
speculation = "prompt-lookup"

[limits]
cpu_ms = 1000

[runtime]
max_instances = 100

[sessions]
ttl_h = 24
idempotency_h = 48

[http]
origins = ["https://app.example.com"]
trusted_proxies = ["10.0.0.0/8"]

[auth]
required = true

[grants]
hosts = ["*"]

[[grants.tools]]
tool = "mcp:files/*"

[batch]
max_running = 4
retention_h = 12
file_retention_h = 48

[outbound]
allow_private = ["127.0.0.0/8"]
max_running = 10

[mcp.files]
command = ["server", "--stdio"]

[mcp.web]
url = "https://mcp.example.com"

[tenants.default]
requests_per_minute = 60

[tenants.acme]
weight = 2.0

[[webhook]]
url = "https://example.com/hook"
topics = ["skep.*"]

[telemetry]
log = "info"
"#;
    vec![whole.as_bytes().to_vec(), b"".to_vec()]
}
