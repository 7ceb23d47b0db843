{{- define "outrider.telemetry" -}}
{{- $parts := list -}}
{{- with .Values.telemetry.otlp }}{{ $parts = append $parts (printf "otlp=%s" .) }}{{ end -}}
{{- with .Values.telemetry.prometheusPort }}{{ $parts = append $parts (printf "prometheus=%d" (int .)) }}{{ end -}}
{{- join "," $parts -}}
{{- end -}}

{{/* The file that `outrider serve --config` reads. */}}
{{- define "outrider.config" -}}
{{- $target := .Values.target -}}
{{- $draft := .Values.draft -}}
{{- $own := dict
  "deployment_name" (include "outrider.fullname" .)
  "model" .Values.model
  "draft_model" .Values.draftModel
  "num_coordinators" (int .Values.coordinator.replicas)
  "num_targets" (int $target.replicas)
  "num_drafts" (int $draft.replicas)
  "coordinator_resources" (printf "%s=1" (include "outrider.resource" "coordinator"))
  "target_resources" (printf "%s=1" (include "outrider.resource" "target"))
  "draft_resources" (printf "%s=1" (include "outrider.resource" "draft"))
  "tensor_parallel_size" (int $target.ranks)
  "draft_tensor_parallel_size" (int $draft.ranks)
  "target_num_gpus" (divf $target.gpus $target.slots)
  "draft_num_gpus" (divf $draft.gpus $draft.slots)
  "host" "0.0.0.0"
  "insecure" true
  "grpc_port" (int (include "outrider.grpcPort" .))
  "port" (int (include "outrider.httpPort" .))
  "health_port" (int (include "outrider.healthPort" .))
  "redis_url" (include "outrider.redisUrl" .)
  "redis_key_prefix" .Values.redis.keyPrefix
  "telemetry" (include "outrider.telemetry" .)
  "stop_timeout_s" (int .Values.drainSeconds)
-}}
{{- if not .Values.redis.enabled -}}
{{- with .Values.redis.external.username }}{{ $_ := set $own "redis_username" . }}{{ end -}}
{{- end -}}
{{- if include "outrider.caFromSecret" . -}}
{{- $_ := set $own "redis_ca_file" (printf "/etc/outrider/redis/%s" .Values.redis.external.caKey) -}}
{{- end -}}
{{- with .Values.security }}
{{- if .keysSecret }}{{ $_ := set $own "api_key_file" (include "outrider.keysPath" $) }}{{ end -}}
{{- with .internalTlsSecret }}{{ $_ := set $own "internal_tls_dir" "/etc/outrider/internal" }}{{ end -}}
{{- end -}}
{{- /* Before actors start, Kubernetes may have to start pods and fetch their image. */ -}}
{{- $defaults := dict "startup_timeout_s" 1800 "model_timeout_s" 3600 -}}
{{- toYaml (mergeOverwrite $defaults (deepCopy .Values.settings) $own) -}}
{{- end -}}
