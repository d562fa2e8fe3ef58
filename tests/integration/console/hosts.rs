//! The hosts that the scenarios use, and the scenarios.

use super::Browser;
use crate::{
    config_host::{Up, skep},
    durability::{Process, tiny_model, tiny_model_of},
    harness::{Host, Killed, client, example, guest},
    ports::unused_address,
    scripted_upstream::{ScriptedUpstream, answered},
    upstreams::options,
};
use serde_json::json;
use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpListener,
    num::NonZeroUsize,
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::runtime::Handle;

/// A text that would run a script if a page took it for HTML.
const HOSTILE: &str = "<img src=x onerror=alert(1)><script>alert(2)</script>[x](javascript:alert(3))";

/// Runs a blocking scenario beside the runtime of the test, which fails as the scenario does.
async fn blocking<T: Send + 'static>(run: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(run).await {
        Ok(returned) => returned,
        Err(failed) => std::panic::resume_unwind(failed.into_panic()),
    }
}

/// Deploys an example whose turns may take ten minutes, as they do on a machine that runs other tests at the same time.
async fn deploy_patient(host: &Host, folder: &str) {
    let source = example(folder).await;
    let lines = source.manifest_toml.lines();
    let manifest: Vec<&str> =
        lines.map(|line| if line.starts_with("turn_ms") { "turn_ms = 600000" } else { line }).collect();
    let (status, deployed) = host.deploy(&manifest.join("\n"), source.component).await;
    assert_eq!(status, 201, "{deployed}");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_page_is_accessible_in_both_themes_and_on_a_phone() {
    let Some(browser) = blocking(Browser::install).await else { return };
    let host = Host::start_with(options("[requests]\nlog = \"full\"\n"));
    for folder in ["room-service", "approval"] {
        deploy_patient(&host, folder).await;
    }
    assert_eq!(host.message("room-service", "guest-7", "I would like to order a tea.").await.0, 200);
    // A name without a place where a line could break.
    let long = "northern_hives_".repeat(8);
    assert_eq!(host.deploy_guest("noop", "echo", "").await.0, 201);
    assert_eq!(host.message("echo", &long, "1").await.0, 200);
    let url = host.url.clone();
    blocking(move || browser.run("pages", &url, &[("LONG", &long)], |_| String::new())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_paint_waits_for_the_document_and_its_styles_alone() {
    let Some(browser) = blocking(Browser::install).await else { return };
    let model = tempfile::tempdir().unwrap();
    tiny_model(model.path());
    let mut options = Host::options(None);
    options.model = model.path().to_str().unwrap().to_owned();
    let host = Host::start_with(options);
    let url = host.url.clone();
    blocking(move || browser.run("paint", &url, &[], |_| String::new())).await;
}

/// A receiver of webhooks that is gone for good until it is mended.
#[derive(Clone, Default)]
struct Receiver {
    is_mended: Arc<AtomicBool>,
    accepted: Arc<AtomicUsize>,
}

impl Receiver {
    /// Starts the receiver and returns its address.
    fn start(&self) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/hook", listener.local_addr().unwrap());
        let Receiver { is_mended, accepted } = self.clone();
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
                let status = if is_mended.load(Ordering::SeqCst) { "204 Fine" } else { "410 Gone" };
                let answer = format!("HTTP/1.1 {status}\r\nconnection: close\r\n\r\n");
                let _ = stream.write_all(answer.as_bytes());
                accepted.fetch_add(usize::from(status.starts_with("204")), Ordering::SeqCst);
            }
        });
        url
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_is_delivered_again_from_the_inbox() {
    let Some(browser) = blocking(Browser::install).await else { return };
    let receiver = Receiver::default();
    let address = receiver.start();
    let file = |topics: &str| {
        format!(
            "[[model]]\nname = \"small\"\nsource = \".\"\n[outbound]\nallow_private = [\"127.0.0.0/8\"]\n\
             [[webhook]]\nurl = \"{address}\"\ntopics = [{topics}]\n\
             secret = \"whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\"\n"
        )
    };
    let up = Up::start(&file("\"order.*\""));
    // A webhook whose receiver is gone is tried again once its section has changed.
    let mended = file("\"order.*\", \"bill.*\"");
    let url = up.host.url.clone();
    blocking(move || {
        browser.run("inbox", &url, &[], |asked| {
            match asked {
                "mend" => {
                    receiver.is_mended.store(true, Ordering::SeqCst);
                    Handle::current().block_on(up.reload(&mended));
                }
                "delivered" => {
                    let end = Instant::now() + Duration::from_secs(60);
                    while receiver.accepted.load(Ordering::SeqCst) == 0 {
                        assert!(Instant::now() < end, "nothing was delivered");
                        std::thread::sleep(Duration::from_millis(10));
                    }
                }
                other => panic!("{other}"),
            }
            "done".to_owned()
        });
        assert_eq!(receiver.accepted.load(Ordering::SeqCst), 1);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_and_ranks_have_figures_of_their_own() {
    let Some(browser) = blocking(Browser::install).await else { return };
    let model = tempfile::tempdir().unwrap();
    tiny_model(model.path());
    let mut options = Host::options(None);
    options.model = model.path().to_str().unwrap().to_owned();
    options.replicas = NonZeroUsize::new(2).unwrap();
    (options.executor.tensor_parallel, options.executor.pipeline_parallel) = (2, 2);
    let host = Host::start_with(options);
    let url = host.url.clone();
    blocking(move || browser.run("engine", &url, &[], |_| String::new())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_load_of_experts_is_a_map() {
    let Some(browser) = blocking(Browser::install).await else { return };
    let model = tempfile::tempdir().unwrap();
    tiny_model_of("qwen3-moe", model.path());
    let mut options = Host::options(None);
    options.model = model.path().to_str().unwrap().to_owned();
    options.executor.tensor_parallel = 2;
    let host = Host::start_with(options);
    let url = host.url.clone();
    blocking(move || browser.run("experts", &url, &[], |_| String::new())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_person_chats_deploys_forks_and_approves() {
    let Some(browser) = blocking(Browser::install).await else { return };
    let host = Host::start(None);
    host.deploy_example("approval").await;
    let folder = tempfile::tempdir().unwrap();
    let component = folder.path().join("ledger.wasm");
    std::fs::write(&component, blocking(|| guest("ledger")).await).unwrap();
    let manifest = folder.path().join("agent.toml");
    std::fs::write(&manifest, "name = \"ledger\"\n").unwrap();
    let url = host.url.clone();
    blocking(move || {
        let files = [
            ("COMPONENT", component.to_str().unwrap().to_owned()),
            ("MANIFEST", manifest.to_str().unwrap().to_owned()),
        ];
        let files: Vec<(&str, &str)> = files.iter().map(|(name, path)| (*name, path.as_str())).collect();
        browser.run("work", &url, &files, |_| String::new());
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_is_dropped_rolled_back_and_deleted() {
    let Some(browser) = blocking(Browser::install).await else { return };
    let component = tempfile::NamedTempFile::with_suffix(".wasm").unwrap();
    std::fs::write(component.path(), blocking(|| guest("noop")).await).unwrap();
    let up = Up::start(
        "[[model]]\nname = \"small\"\nsource = \".\"\n[grants]\nhosts = [\"https://api.example.com\"]\n",
    );
    let url = up.host.url.clone();
    blocking(move || {
        let environment = [("COMPONENT", component.path().to_str().unwrap()), ("HOSTILE", HOSTILE)];
        browser.run("agent", &url, &environment, |_| String::new());
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tenants_sign_in_and_do_not_see_each_other() {
    let Some(browser) = blocking(Browser::install).await else { return };
    blocking(move || {
        let (model, data) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        tiny_model(model.path());
        let process = Process::with(Stdio::inherit(), &["--auth", "required"], model.path(), data.path());
        let key = |arguments: &[&str]| {
            let at = ["--data", data.path().to_str().unwrap()];
            let output = skep(&["key", "create"], &[arguments, &at].concat());
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            String::from_utf8(output.stdout).unwrap().trim().to_owned()
        };
        let keys = [
            ("ADMIN", key(&["--role", "admin"])),
            ("ACME", key(&["--role", "invoke", "--tenant", "acme"])),
            ("ZENITH", key(&["--role", "read", "--tenant", "zenith"])),
        ];
        let component = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(component.path(), guest("ledger")).unwrap();
        let environment: Vec<(&str, &str)> = keys.iter().map(|(name, key)| (*name, key.as_str())).collect();
        let component = [("COMPONENT", component.path().to_str().unwrap())];
        let environment = [environment, component.to_vec()].concat();
        browser.run("tenants", &process.url, &environment, |_| String::new());
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_prints_the_address_of_its_console_unless_it_has_none() {
    let model = tempfile::tempdir().unwrap();
    tiny_model(model.path());
    for (flags, has_console) in [(&[][..], true), (&["--no-ui"][..], false)] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_skep"));
        command.args(["up", "--ephemeral", "--listen", "127.0.0.1:0", "--threads", "1"]).args(flags);
        command.args(["--log-level", "error", "--model"]).arg(model.path());
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut process = Killed(command.spawn().unwrap());
        // The pipe stays open, so that the host prints everything.
        let mut lines = BufReader::new(process.0.stdout.take().unwrap()).lines().map(|line| line.unwrap());
        let printed: Vec<String> = lines.by_ref().take_while(|line| line != "next:").collect();
        let mut words = printed.iter().flat_map(|line| line.split_whitespace());
        let url = words.find(|word| word.starts_with("http://")).unwrap().trim_end_matches('/');
        let console = printed.iter().map(|line| line.trim()).find(|line| line.starts_with("console "));
        assert_eq!(console.is_some(), has_console, "{printed:?}");
        assert!(console.is_none_or(|line| line == format!("console {url}/ui")), "{printed:?}");
        // The root leads to the console.
        for path in ["/", "/ui", "/ui/engine"] {
            let status = client().get(format!("{url}{path}")).send().await.unwrap().status().as_u16();
            assert_eq!(status, if has_console { 200 } else { 404 }, "{path}");
        }
        let ready = client().get(format!("{url}/healthz")).send().await.unwrap();
        assert_eq!(ready.status(), 200);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_open_page_survives_a_killed_host() {
    let Some(browser) = blocking(Browser::install).await else { return };
    blocking(move || {
        let (model, data) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        tiny_model(model.path());
        let address = unused_address();
        let start = || Process::with(Stdio::inherit(), &["--listen", &address], model.path(), data.path());
        let mut process = Some(start());
        browser.run("restart", &format!("http://{address}"), &[], |asked| {
            match asked {
                "kill" => process.take().unwrap().kill(),
                "start" => process = Some(start()),
                other => panic!("{other}"),
            }
            "done".to_owned()
        });
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_texts_are_shown_as_text() {
    let Some(browser) = blocking(Browser::install).await else { return };
    let said = || [json!({"role": "assistant", "reasoning_content": HOSTILE}), json!({"content": HOSTILE})];
    let upstream = ScriptedUpstream::start(move |_| answered(&said())).await;
    let host = Host::start_with(options(&format!(
        "[requests]\nlog = \"full\"\n[grants]\nmodels = [\"*\", \"far/*\"]\n\
         [[upstream]]\nname = \"far\"\nkind = \"openai\"\nurl = \"{}\"\n\
         [[upstream.models]]\nname = \"m\"\ncontext_length = 65536\n",
        upstream.url
    )));
    let grants = "[grants]\nmodels = [\"far/*\"]\n";
    assert_eq!(host.deploy_guest("generate", "talker", grants).await.0, 201);
    assert_eq!(host.deploy_guest("ledger", "ledger", "").await.0, 201);
    let message = json!({"text": HOSTILE, "data": {"model": "far/m"}});
    host.ok("/v1/agents/talker/sessions/s/messages", message).await;
    assert_eq!(host.message("ledger", "s", HOSTILE).await.0, 200);
    assert_eq!(host.deploy_guest("panic", "breaks", "").await.0, 201);
    let (status, failed) = host.message("breaks", "s", HOSTILE).await;
    assert!(status >= 400, "{failed}");
    let url = host.url.clone();
    blocking(move || browser.run("hostile", &url, &[("HOSTILE", HOSTILE)], |_| String::new())).await;
    assert!(upstream.asked().len() > 1, "the playground asked, too");
}

/// Starts a host with a tiny model, a log of requests and an agent that answers without a model.
async fn light_host() -> (tempfile::TempDir, Host) {
    let model = tempfile::tempdir().unwrap();
    tiny_model(model.path());
    let mut options = options("[requests]\nlog = \"metadata\"\n");
    options.model = model.path().to_str().unwrap().to_owned();
    let host = Host::start_with(options);
    assert_eq!(host.deploy_guest("noop", "echo", "").await.0, 201);
    (model, host)
}

/// With `LONGEST_TASK_MS=50` a task of the page that keeps the browser longer than that is a failure.
#[tokio::test(flavor = "multi_thread")]
async fn long_lists_keep_few_rows_in_the_document() {
    let Some(browser) = blocking(Browser::install).await else { return };
    let (_model, host) = light_host().await;
    let url = host.url.clone();
    blocking(move || browser.run("smooth", &url, &[("AGENT", "echo")], |_| String::new())).await;
}

/// `MINUTES=60` plays a whole hour.
#[tokio::test(flavor = "multi_thread")]
async fn a_page_that_stays_open_does_not_grow() {
    let Some(browser) = blocking(Browser::install).await else { return };
    let (_model, host) = light_host().await;
    assert_eq!(host.message("echo", "p-0", "1").await.0, 200);
    host.ok("/v1/completions", json!({"prompt": "The", "max_tokens": 1})).await;
    let minutes = std::env::var("MINUTES").unwrap_or_else(|_| "20".to_owned());
    let url = host.url.clone();
    blocking(move || browser.run("hour", &url, &[("MINUTES", &minutes)], |_| String::new())).await;
}
