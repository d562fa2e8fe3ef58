//! The JSON of Skep's HTTP API: what the gateway writes and a client reads, as one set of types.
//!
//! Each type describes itself as a JSON Schema, from which the OpenAPI document is made. Types that a host sends ignore unknown
//! fields and accept unknown words, so that an older client can read what a newer host says. Types that a client sends refuse
//! unknown fields, because a misspelled field would otherwise be ignored.
//!
//! JSON that belongs to agents, such as the arguments of a call, has the type parameter `J`. A client uses [`serde_json::Value`],
//! and the host uses its own type, which keeps the text.
#![forbid(unsafe_code)]

mod agent;
mod ai;
mod anthropic;
mod approval;
mod chat;
mod client_batch;
mod client_file;
mod cluster;
mod completion;
mod config;
mod engine;
mod error;
mod event;
mod health;
mod held;
mod key;
mod kv_disk;
mod limits;
mod log;
mod mcp_server;
mod message;
mod model;
mod page;
mod request_log;
mod response;
mod schedule;
mod schema_check;
mod secret;
mod session;
mod status;
mod tenant;
mod timeline;
mod tokens;
mod turn;
mod turn_event;
mod usage;
mod usage_report;
mod version;
mod webhook;
mod words;

pub use agent::{Agent, AgentDetail, Agents, BrokenAgent, Deployment, RecentTurns, Tool, ToolHints};
pub use ai::{
    AiAnswer, AiAnswerEnvelope, AiBatchAnswer, AiBatchAnswers, AiBatchAnswersEnvelope, AiChunk, AiEnvelope,
    AiError, AiErrorSource, AiFailure, AiToolCall, BatchItems, BatchPhase, BatchStatus, BatchStatusEnvelope,
    ChatCompletionEnvelope, QueuedBatch, QueuedBatchEnvelope,
};
pub use anthropic::{
    AnthropicBlock, AnthropicDelta, AnthropicEnd, AnthropicError, AnthropicErrorDetail, AnthropicEvent,
    AnthropicMessage, AnthropicTokenCount, AnthropicUsage,
};
pub use approval::{Approval, Decide, Decision};
pub use chat::{
    AssistantMessage, ChatChoice, ChatChunk, ChatCompletion, ChatDelta, ChatLogprobs, ChunkChoice,
    ChunkFunction, ChunkToolCall, FunctionCall, FunctionToolCall, LikelyToken, TokenLogprob,
};
pub use client_batch::{
    Batch, BatchCounts, BatchError, BatchErrors, BatchState, BatchTimes, CreateBatch, ExpiresAfter,
};
pub use client_file::{ClientFile, DeletedFile, UploadFile};
pub use cluster::{
    ClusterHost, ClusterHostRole, ClusterHostState, ClusterHostWork, ClusterHosts, ClusterVersions,
};
pub use completion::{Completion, CompletionChoice, CompletionLogprobs};
pub use config::{Config, ConfigReload, Setting, SettingChange};
pub use engine::{
    EngineFigures, EngineLoad, EngineSample, ExpertLayer, KvPageOwner, KvPageOwners, MemoryUse, ModelFigures,
    ModelSample, RankMemory, RankTime, ReplicaMemory,
};
pub use error::{ErrorBody, ErrorDetail};
pub use event::{CloudEvent, Event, NewEvent, PublishedEvent, PublishedState};
pub use health::{Health, Readiness};
pub use held::{DecideHeld, Held, HeldDecision};
pub use key::{CallerInfo, Key, NewKey, Role, SignIn};
pub use kv_disk::{
    KvClusterCache, KvDisk, KvDiskTotals, KvPeers, KvPin, KvPurged, SessionPin, WarmedConversation,
    WarmedSession,
};
pub use limits::{MoneyLimit, TenantLimits};
pub use log::{LogLevel, LogLine};
pub use mcp_server::{McpServer, McpState, McpTool};
pub use message::{Message, MessagePage, NumberedMessage, SendMessage};
pub use model::{ChangeModel, Model, ModelAction, ModelCapabilities, ModelDetails, SamplingDefaults};
pub use page::{
    ApprovalList, BatchPage, ClientFilePage, DeadLetterPage, EventPage, KeyList, List, LogLineList,
    McpServerList, ModelList, Page, SchedulePage, SecretList, SessionPage, StateValuePage, TenantList,
    TurnSummaryPage, VersionList, WebhookPage,
};
pub use request_log::{
    ModelRequest, ModelRequestPage, RequestAgent, RequestAttempt, RequestCall, RequestCost, RequestMessage,
    RequestModel, RequestResult, RequestStatus, RequestSurface, RequestTexts, RequestTiming, RequestUsage,
};
pub use response::{
    DeletedResponse, IncompleteDetails, InputTokens, NumberedResponseEvent, OutputTokens, ReasoningPart,
    Response, ResponseCaller, ResponseError, ResponseEvent, ResponseInputPage, ResponseItem, ResponsePart,
    ResponseReasoning, ResponseSettings, ResponseStatus, ResponseUsage,
};
pub use schedule::{Schedule, ScheduleState, ScheduleTiming};
pub use schema_check::{CheckSchema, SchemaCheck, SchemaError, SchemaNote};
pub use secret::{NewSecret, Secret};
pub use session::{
    Conversation, ForkSession, RecentSession, RecentSessionPage, SaidMessage, Session, SessionDetail,
    StateKind, StateValue,
};
pub use status::{
    AgentCounts, DataPlace, DiskStatus, HeldWork, HostStatus, KvPages, LimitStatus, ModelStatus, QueueDepths,
    SessionCounts,
};
pub use tenant::{DeletedTenant, Tenant};
pub use timeline::{Timeline, TimelineCall, TurnSummary};
pub use tokens::{Detokenize, Detokenized, Tokens};
pub use turn::{
    AcceptedTurn, ToolCall, TotalTime, Turn, TurnError, TurnMessage, TurnState, TurnStatus, TurnTiming,
};
pub use turn_event::{
    ApprovalDecided, ApprovalRequired, Delta, Generation, GenerationRestarted, ModelChanged, ModelChosen,
    Thinking, Timing, ToolResult, TurnEvent, TurnStarted,
};
pub use usage::{CompletionTokens, PromptTokens, Usage};
pub use usage_report::{EstimatedUsage, UnknownCost, UsageCost, UsageGrouping, UsageLine, UsageReport};
pub use version::{AgentVersion, Rollback};
pub use webhook::{AddedWebhook, DeadLetter, NewWebhook, Webhook, WebhookState, WebhookTest, WebhookTry};
pub use words::marker;
