//! The text that `skep up --help` prints after its flags: examples, and all settings that skep.toml may have.

/// The end of the help of `skep up`.
pub(super) const AFTER: &str = "\
Examples:
  skep up
  skep up my-agent examples/hello
  skep up --watch my-agent                    redeploys it when one of its files changes
  skep up --model hf:Qwen/Qwen2.5-0.5B-Instruct-GGUF:qwen2.5-0.5b-instruct-q8_0.gguf
  skep up --model small=smollm2-135m --model models/big.gguf
  skep up --config skep.toml --listen 0.0.0.0:8080

skep.toml, every line optional:
  listen = \"127.0.0.1:8080\"
  data = \"data\"                 # relative to the file
  database = \"postgres://skep@db/skep\"   # instead of a file in the data folder
  durability = \"process\"        # or \"power\": each turn waits for the disk
  model = \"smollm2-135m\"
  device = \"cuda\"               # or \"auto\", \"cpu\", \"cuda:0,1\"
  threads = 4
  [engine]
  replicas = 2
  kv = \"f16\"                    # or \"f32\", \"i8\" (CPU), \"fp8\" (CUDA)
  kv_tokens = 65536             # per replica
  [limits]                      # ceilings for every agent
  memory_mb = 64
  tokens_per_day = 1000000
  [tenants.acme]                # or [tenants.default]
  tokens_per_day = 5000000
  money_per_day = \"1.50 USD\"     # refuses models without a price in this currency
  [prices.\"smollm2-135m\"]       # for a million tokens
  input = 0.60
  cached_input = 0.10
  output = 3.00
  currency = \"USD\"
  from = \"2026-01-01\"
  [grants]                      # the maximum that agents may be granted; default: the default model
  models = [\"smollm2-135m\"]
  tools = [\"agent:*/*\"]
  hosts = [\"https://*.example.com\"]
  [auth]
  required = true               # the default, unless only this machine can connect
  [http]
  drain_s = 30
  [telemetry]
  otlp_endpoint = \"http://127.0.0.1:4318\"
  [[webhook]]                   # one section per address
  url = \"https://example.com/hook\"
  topics = [\"skep.turn.failed\"]
  secret = \"whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\"

All settings:
  listen, data, database, standby (wait while another host uses the database),
  durability (\"process\", \"power\"), model, device, deterministic, threads
  [[model]]  instead of model, for several: name, source (a name, hf:OWNER/REPO[:FILE]
             or a path), aliases, default, device, replicas, tp, pp, context,
             kv_tokens, gpu_memory, weights, load (\"start\", \"demand\"), load_wait_s,
             idle_unload_s, markup, prices (as [prices.NAME] has them); what is left
             out is as [engine] says
  [engine]   replicas, routing (\"affinity\", \"round-robin\"), max_queue,
             max_sequences, step_tokens, step_target_ms, kv, kv_tokens, window_tokens,
             gpu_memory (0.1 to 1: the part of a CUDA device that a model may take),
             weights (\"keep\", \"q8_0\", \"bf16\": a conversion on the CPU),
             activations (on CUDA devices: \"bf16\", \"f16\"), isa,
             pin_threads, speculation (\"auto\", \"off\", \"prompt-lookup\"),
             default_deadline_s, tensor_parallel, pipeline_parallel,
             rank_deadline_s, load_wait_s (that a request waits for a load: 30)
  [cluster]  enabled (true: share the database with other hosts), url (where they
             reach this one, such as \"http://10.0.0.2:8080\"), key_file (with the
             key that all hosts have; or SKEP_CLUSTER_KEY), role (\"all\";
             \"gateway\": no model here, other hosts compute; \"prefill\": computes
             prompts for hosts with the role \"decode\"; \"balancer\": passes all
             requests on), default_model (of a gateway: a model of the other hosts),
             placement (of sessions without an owner: \"balanced\", \"here\"),
             prefill_tokens (256: the shortest prompt, in tokens, that a prefill host
             may compute)
  [kv]       disk_gb (KV pages that are kept in the data folder: 4; 0 keeps none),
             disk_free_percent (10), write_mb_s (200), always_read (false),
             pin_percent (25: of the pages, that pins keep), warm_ahead_s (2: pages
             of a session are read before its alarm; 0 reads none ahead), encrypt
             (false: with the key of the secrets), peers (true: hosts of a cluster
             give each other pages), transfer (the lane that these take: \"http\",
             \"nixl\", or \"auto\": NIXL where its library is named), nixl_dir (folder
             of the library; or SKEP_NIXL), nixl_devices (network devices on which
             NIXL listens, such as \"eth1\"; or UCX_NET_DEVICES), nixl_mb (128: memory
             that is shared with its process)
  [limits]   memory_mb, tables, table_elements, instances, cpu_ms, turn_ms,
             approval_ms, tokens_per_turn, tokens_per_day, state_kb, session_kb,
             host_calls, host_call_kb, fetches, fetch_kb, log_kb,
             concurrent_turns, schedules, events
  [runtime]  max_agents, max_sessions_loaded, max_session_bytes, max_instances,
             max_component_bytes, max_artifact_bytes, disk_warning_bytes,
             compile_s, mailbox, stack_kb, max_waiting_bytes (messages that wait
             or run: 512 MiB), max_waiting_bytes_per_tenant (128 MiB),
             max_waiting_bytes_per_session (32 MiB)
  [secrets]  key_file or key_command (a program that prints the keys): what secrets
             are sealed with; default: secrets.key in the data folder
  [sessions] ttl_h: hours after its last turn until a session is deleted;
             idempotency_h: hours that the answer to an idempotency key
             is kept (720); usage_days: days for which reports list sessions
             one by one (31)
  [tenants.NAME]
             requests_per_minute, request_burst, tokens_per_minute,
             tokens_per_day, money_per_day (\"1.50 USD\"), weight, models (that
             may be used for the tenant; \"*\" is all of this host), requests
             (as log under [requests]), kv_disk_percent (of the KV pages on disk);
             NAME \"default\" covers tenants without a section
  [agents.NAME]
             weight: its share of the model, relative to other agents of its tenant;
             public_prompt (true: tenants share the KV pages of its system message)
  [grants]   models (\"*\" is all of this host, \"UPSTREAM/*\" all of an
             upstream), tools (\"agent:NAME/TOOL\", \"mcp:SERVER/TOOL\",
             \"http/fetch\", \"client/elicit\"; * for any name), hosts (where agents may send
             requests; \"*\" is everywhere)
  [auth]     required, open_metrics
  [http]     max_body_bytes, drain_s, origins (web pages that may use the
             host, such as \"https://app.example.com\"), header_timeout_s (15),
             idle_timeout_s (75), send_timeout_s (30: without reading),
             max_connections (8192), max_connections_per_address (1024),
             trusted_proxies (whose X-Forwarded-For is trusted, such as
             \"10.0.0.0/8\"), console (true: serves it at /ui)
  [mcp.NAME] command, env, or url, headers; tools, timeout_ms,
             elicitation = \"defaults\" (answers its forms): an MCP server whose
             tools agents may be granted, see: skep mcp --help
  [ai]       models: names for clients of /ai/run, for models, upstreams'
             models, routes and agents, such as
             models = { \"@cf/meta/llama-3.1-8b-instruct\" = \"smollm2-135m\" }
  [batch]    max_running, max_items, max_batches, max_stored_mb, retention_h,
             file_retention_h (720: result files), max_attempts
  [responses]
             retention_days (30), max_stored_mb (1024): responses that clients
             store and continue
  [outbound] allow_private (private addresses that agents may reach, such as
             \"10.1.0.0/16\" or \"10.1.2.3:8080\"), max_running
  [prices.NAME]
             input, cached_input, output, cache_write (written to the cache of
             an upstream): the prices of a million tokens of the model NAME, and
             currency (\"USD\"); or catalog: a model whose list price is taken;
             from: the first day, such as \"2026-01-01\"; [[prices.NAME]] has
             prices from several days on; or prices of a [[model]] or of a model
             of an [[upstream]]
  [requests] log (\"off\", \"metadata\", \"full\": of requests to models, see:
             skep requests --help), retention_days (7), max_mb (256), body_kb (64)
  [telemetry]
             otlp_endpoint
  [[upstream]]
             name, kind (\"openai\", \"anthropic\", \"workers-ai\"), url,
             key (\"secret:NAME\") or key_env, models (name, remote_name,
             context_length, max_output, tools, structured, reasoning,
             reasoning_control, images, prices, as [prices.NAME] has them),
             requests_per_minute, tokens_per_minute, max_in_flight, max_wait_ms,
             connect_ms, first_token_ms, idle_ms, attempts, breaker_failures,
             breaker_cool_down_ms: a server whose models are UPSTREAM/MODEL
  [[route]]  name, choice (\"ordered\", \"weighted\"), first_token_ms, models (model,
             weight, min_prompt_tokens, max_prompt_tokens, tools, images,
             tenants, max_price): an answer comes from the first model that can
  [[webhook]]
             url, topics, secret

Traces are sent to the collector that --otlp-endpoint, the file,
OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT names; OTEL_SERVICE_NAME
names this host in them.";

#[cfg(test)]
mod tests {
    use super::AFTER;
    use crate::config::Config;

    /// Returns the fields that are allowed under a header, as the parser lists them in its error for an
    /// unknown field.
    fn fields(header: &str) -> Vec<String> {
        let message =
            skep_runtime::parse_toml::<Config>(&format!("{header}\nnot-a-field = 1\n")).expect_err(header);
        let Some((_, expected)) = message.split_once("unknown field `not-a-field`, expected ") else {
            panic!("{header}: {message}");
        };
        expected.split('`').skip(1).step_by(2).map(str::to_owned).collect()
    }

    /// Returns the header under which a field of the file is a section, if it is one.
    fn header(field: &str) -> Option<String> {
        let headers = [format!("[{field}]"), format!("[{field}.NAME]"), format!("[[{field}]]")];
        headers.into_iter().find(|header| {
            let text = format!("{header}\nnot-a-field = 1\n");
            skep_runtime::parse_toml::<Config>(&text)
                .is_err_and(|message| message.contains("unknown field `not-a-field`"))
        })
    }

    #[test]
    fn every_section_and_field_of_the_file_is_in_the_help() {
        let (_, settings) = AFTER.split_once("All settings:\n").expect("the help lists the settings");
        let (settings, _) = settings.split_once("\n\n").expect("an empty line ends the list");
        let (top, _) = settings.split_once("\n  [").expect("sections follow");
        let word = |text: &str, word: &str| {
            text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').any(|found| found == word)
        };
        let mut sections = 0;
        for field in fields("") {
            let Some(header) = header(&field) else {
                assert!(word(top, &field), "{field} is missing");
                continue;
            };
            sections += 1;
            let (_, section) = settings
                .split_once(&format!("\n  {header}"))
                .unwrap_or_else(|| panic!("{header} is missing"));
            let section = section.split("\n  [").next().unwrap_or_default();
            for field in fields(&header) {
                assert!(word(section, &field), "{header} {field} is missing");
            }
        }
        assert_eq!(settings.matches("\n  [").count(), sections, "a section that the file cannot have");
    }
}
