//! Images in messages, and plain texts to continue, from a client through the host to an upstream.

use crate::{
    harness::{Host, MODEL, client, content},
    scripted_upstream::{Asked, ScriptedUpstream, answered, continued, refused},
    upstreams::{nowhere, options},
};
use axum::http::StatusCode;
use serde_json::{Value, json};

/// The beginning of a PNG file, in base64.
const PNG: &str = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1Pe";

/// Starts a host with an upstream that has a model which sees and one which does not, and with routes.
fn host_beside(upstream: &ScriptedUpstream, more: &str) -> Host {
    let (far, gone) = (&upstream.url, nowhere());
    Host::start_with(options(&format!(
        "{more}[[upstream]]\nname = \"far\"\nkind = \"openai\"\nurl = \"{far}\"\nattempts = 1\n\
         [[upstream.models]]\nname = \"sees\"\nimages = true\ncontext_length = 4096\n\
         [[upstream.models]]\nname = \"blind\"\n\
         [[upstream]]\nname = \"gone\"\nkind = \"openai\"\nurl = \"{gone}\"\nattempts = 1\nbreaker_failures = 1000\n\
         [[upstream.models]]\nname = \"m\"\n\
         [[upstream]]\nname = \"claude\"\nkind = \"anthropic\"\nurl = \"{gone}\"\nattempts = 1\n\
         [[upstream.models]]\nname = \"m\"\n\
         [[route]]\nname = \"smart\"\n\
         [[route.models]]\nmodel = \"{MODEL}\"\nimages = false\n[[route.models]]\nmodel = \"far/sees\"\n\
         [[route]]\nname = \"texts\"\n\
         [[route.models]]\nmodel = \"gone/m\"\n[[route.models]]\nmodel = \"far/blind\"\n\
         [[route]]\nname = \"home\"\n\
         [[route.models]]\nmodel = \"gone/m\"\n[[route.models]]\nmodel = \"{MODEL}\"\n"
    )))
}

fn picture(model: &str, url: &str) -> Value {
    let parts = json!([
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": url, "detail": "high"}},
    ]);
    json!({"model": model, "max_tokens": 8, "messages": [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]})
}

#[tokio::test(flavor = "multi_thread")]
async fn images_reach_upstreams_that_see_and_no_other_model() {
    let upstream = ScriptedUpstream::start(|_| answered(&[json!({"content": "A cat."})])).await;
    let host = host_beside(&upstream, "");
    for url in [PNG, "https://images.example/cat.png?size=2"] {
        let answer = host.ok("/v1/chat/completions", picture("far/sees", url)).await;
        assert_eq!(content(&answer), "A cat.");
        let sent = upstream.asked().last().unwrap().body["messages"][1]["content"].clone();
        assert_eq!(sent, picture("", url)["messages"][1]["content"]);
    }
    let run = json!({"messages": picture("", PNG)["messages"]});
    let answer = host.ok("/ai/run/far/sees", run).await;
    assert_eq!(answer["result"]["response"], "A cat.");

    // A route chooses by the images of the request.
    let response =
        client().post(host.at("/v1/chat/completions")).json(&picture("smart", PNG)).send().await.unwrap();
    assert_eq!(
        (response.status().as_u16(), &response.headers()["x-skep-model"]),
        (200, &"far/sees".parse().unwrap())
    );
    let plain =
        json!({"model": "smart", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2});
    let response = client().post(host.at("/v1/chat/completions")).json(&plain).send().await.unwrap();
    assert_eq!(response.headers()["x-skep-model"], MODEL);

    let asked = upstream.asked().len();
    for model in [MODEL, "far/blind", "home"] {
        let (status, refused) = host.post("/v1/chat/completions", picture(model, PNG)).await;
        assert_eq!(
            (status, &refused["error"]["param"]),
            (400, &json!("messages[1].content[1]")),
            "{model}: {refused}"
        );
        assert!(refused["error"]["message"].as_str().unwrap().contains("accepts only text"), "{refused}");
    }
    // The other two APIs have parts of their own, which name the place, too.
    let data = PNG.split_once(',').unwrap().1;
    let of_responses =
        json!([{"type": "input_text", "text": "What is this?"}, {"type": "input_image", "image_url": PNG}]);
    let source = json!({"type": "base64", "media_type": "image/png", "data": data});
    let of_messages = json!([{"type": "text", "text": "What is this?"}, {"type": "image", "source": source}]);
    for model in [MODEL, "far/blind"] {
        for (path, limit, field, content) in [
            ("/v1/responses", "max_output_tokens", "input", &of_responses),
            ("/v1/messages", "max_tokens", "messages", &of_messages),
        ] {
            let mut body = json!({"model": model, limit: 8});
            body[field] = json!([{"role": "user", "content": content}]);
            let (status, refused) = host.post(path, body).await;
            let said = refused["error"]["message"].as_str().unwrap_or_default();
            assert!(status == 400 && said.contains("accepts only text"), "{path} {model}: {refused}");
        }
    }
    let mut many = picture("far/sees", PNG);
    let part = many["messages"][1]["content"][1].clone();
    many["messages"][1]["content"].as_array_mut().unwrap().extend(vec![part; 16]);
    let large = format!("{PNG}{}", "A".repeat(7 << 20));
    for (request, why) in [
        (many, "17 images; at most 16"),
        (picture("far/sees", &large), "at most 5242880 are allowed"),
        (picture("far/sees", "http://images.example/cat.png"), "must be at an https:// address"),
        (picture("far/sees", &PNG.replace("png", "gif")), "is image/png, but its URL says image/gif"),
    ] {
        let (status, refused) = host.post("/v1/chat/completions", request).await;
        assert!(status == 400 && refused["error"]["message"].as_str().unwrap().contains(why), "{refused}");
    }
    assert_eq!(upstream.asked().len(), asked, "nothing that was refused was sent");
}

#[tokio::test(flavor = "multi_thread")]
async fn texts_are_continued_by_upstreams_with_their_usage_and_within_budgets() {
    let upstream = ScriptedUpstream::start(|asked: &Asked| match asked.body["prompt"].as_str() {
        Some("fail") => refused(StatusCode::BAD_REQUEST, "not this one"),
        _ => continued(&[" there", " was"]),
    })
    .await;
    let priced = "[prices.\"far/blind\"]\ninput = 1.0\ncached_input = 1.0\noutput = 2.0\ncurrency = \"USD\"\nfrom = \"2020-01-01\"\n[tenants.local]\ntokens_per_day = 20\n";
    let host = host_beside(&upstream, priced);
    let text = |model: &str| json!({"model": model, "prompt": "Once", "max_tokens": 2});
    let whole = host.ok("/v1/completions", text("far/blind")).await;
    assert_eq!(
        (&whole["choices"][0]["text"], &whole["choices"][0]["finish_reason"]),
        (&json!(" there was"), &json!("length"))
    );
    assert_eq!(
        (&whole["usage"]["prompt_tokens"], &whole["usage"]["completion_tokens"]),
        (&json!(4), &json!(2))
    );
    let asked = upstream.asked().remove(0);
    assert_eq!(
        (asked.path.as_str(), &asked.body["prompt"], &asked.body["max_tokens"]),
        ("/v1/completions", &json!("Once"), &json!(2))
    );

    let mut several = text("texts");
    (several["prompt"], several["echo"], several["n"]) = (json!(["Once", "Then"]), json!(true), json!(2));
    (several["stream"], several["stream_options"]) = (json!(true), json!({"include_usage": true}));
    let events = host.events("/v1/completions", several).await;
    assert_eq!(events.last().map(|(_, data)| data.as_str()), Some("[DONE]"));
    let chunks: Vec<Value> = events.iter().filter_map(|(_, data)| serde_json::from_str(data).ok()).collect();
    for (index, expected) in
        ["Once there was", "Once there was", "Then there was", "Then there was"].iter().enumerate()
    {
        let of_choice = chunks.iter().filter(|chunk| chunk["choices"][0]["index"] == json!(index));
        let text: String = of_choice.map(|chunk| chunk["choices"][0]["text"].as_str().unwrap()).collect();
        assert_eq!(text, *expected);
    }
    let last = chunks.last().unwrap();
    assert_eq!(
        (&last["model"], &last["usage"]["completion_tokens"]),
        (&json!("far/blind"), &json!(8)),
        "{last}"
    );

    // A route falls back, also to a model of this host.
    for (route, expected) in [("texts", "far/blind"), ("home", MODEL)] {
        let response = client().post(host.at("/v1/completions")).json(&text(route)).send().await.unwrap();
        assert_eq!(
            (response.headers()["x-skep-model"].to_str().unwrap(), &response.headers()["x-skep-attempts"]),
            (expected, &"2".parse().unwrap())
        );
        let answer: Value = response.json().await.unwrap();
        assert!(
            answer["model"] == expected && !answer["choices"][0]["text"].as_str().unwrap().is_empty(),
            "{answer}"
        );
    }

    let with = |field: &str, value: Value| {
        let mut request = text("far/blind");
        request[field] = value;
        request
    };
    for (request, param) in [
        (text("claude/m"), "model"),
        (with("prompt", json!([1, 2])), "prompt"),
        (with("prompt", json!("")), "prompt"),
        (with("logprobs", json!(1)), "logprobs"),
        (with("guided_regex", json!("a")), "guided_regex"),
    ] {
        let (status, refused) = host.post("/v1/completions", request).await;
        assert_eq!((status, &refused["error"]["param"]), (400, &json!(param)), "{refused}");
    }
    let (status, refused) = host.post("/v1/completions", with("prompt", json!("fail"))).await;
    assert_eq!((status, &refused["error"]["code"]), (502, &json!("upstream_refused")), "{refused}");
    let (status, refused) = host.post("/v1/completions", text("gone/m")).await;
    assert_eq!((status, &refused["error"]["code"]), (503, &json!("upstream_unavailable")), "{refused}");

    // 1 whole + 4 streamed + 1 by the route, each of 4 tokens in and 2 out. Usage is written in the background.
    let mut used = Value::Null;
    for _ in 0..500 {
        let report = host.get("/v1/usage?by=model").await.1;
        let lines = report["data"].as_array().unwrap();
        used = lines.iter().find(|line| line["name"] == "far/blind").cloned().unwrap_or_default();
        if used["requests"] == 6 {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    let counted = ["requests", "input_tokens", "output_tokens"].map(|field| used[field].as_u64());
    assert_eq!(counted, [Some(6), Some(24), Some(12)], "{used}");
    assert!(used["cost"].to_string().contains("0.000048"), "{used}");

    // The budget of 20 tokens of output is used up in the end.
    let mut last = (200, Value::Null);
    for _ in 0..5 {
        last = host.post("/v1/completions", text("far/blind")).await;
    }
    let (status, refused) = last;
    assert!(
        status == 429 && refused["error"]["message"].as_str().unwrap().contains("`tokens_per_day`"),
        "{refused}"
    );
}
