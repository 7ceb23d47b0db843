{{/* The name of all objects of a release. KubeRay shortens names that are too long for it. */}}
{{- define "outrider.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := .Values.fullnameOverride -}}
{{- if not $full -}}
{{- $full = ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- end -}}
{{- $full | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* The ports on which a coordinator listens in its pod. */}}
{{- define "outrider.grpcPort" -}}50051{{- end -}}
{{- define "outrider.httpPort" -}}8000{{- end -}}
{{- define "outrider.healthPort" -}}50052{{- end -}}
{{- define "outrider.gatewayPort" -}}8080{{- end -}}

{{- define "outrider.image" -}}
{{- include "outrider.imageName" (merge (dict "defaultTag" .Chart.AppVersion) .Values.image) -}}
{{- end -}}

{{/* Takes the values of an image. A digest names one image for ever, so it has no need of a tag. */}}
{{- define "outrider.imageName" -}}
{{- if .digest -}}
{{- printf "%s@%s" .repository .digest -}}
{{- else -}}
{{- printf "%s:%s" .repository (default .defaultTag .tag) -}}
{{- end -}}
{{- end -}}

{{/* Ray's pods do not have these labels: KubeRay's services select pods by app.kubernetes.io/name. */}}
{{- define "outrider.labels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* Takes the root and the component: redis for sessions, gcs for the state of Ray's head, gateway. */}}
{{- define "outrider.componentLabels" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* The number of pods that a role's actors need. Takes a group's values. */}}
{{- define "outrider.pods" -}}
{{- $actors := mul .replicas (default 1 .ranks) -}}
{{- int (ceil (divf $actors (default 1 .slots))) -}}
{{- end -}}

{{/* The name of a Ray resource. An actor of the role needs 1 of it, and a pod has 1 for each slot. */}}
{{- define "outrider.resource" -}}outrider_{{ . }}{{- end -}}

{{- define "outrider.redisUrl" -}}
{{- if .Values.redis.enabled -}}
{{- if .Values.redis.external.url -}}
{{- fail "redis.external.url is given, but redis.enabled is true: set one of them" -}}
{{- end -}}
{{- printf "redis://%s-redis:6379/0" (include "outrider.fullname" .) -}}
{{- else -}}
{{- required "redis.enabled is false: redis.external.url must say where sessions are kept" .Values.redis.external.url -}}
{{- end -}}
{{- end -}}

{{/* Name and key of the Secret with Redis's password, as JSON. Without a password the name is empty. */}}
{{- define "outrider.redisSecret" -}}
{{- $name := .Values.redis.external.existingSecret -}}
{{- $key := .Values.redis.external.existingSecretKey -}}
{{- if .Values.redis.enabled -}}
{{- $name = default (printf "%s-redis" (include "outrider.fullname" .)) .Values.redis.auth.existingSecret -}}
{{- $key = ternary .Values.redis.auth.existingSecretKey "redis-password" (ne .Values.redis.auth.existingSecret "") -}}
{{- end -}}
{{- dict "name" $name "key" $key | toJson -}}
{{- end -}}

{{/* Name and key of the Secret for the Redis that stores the state of Ray's head, as JSON. */}}
{{- define "outrider.gcsSecret" -}}
{{- $gcs := .Values.ray.gcsFaultTolerance -}}
{{- if $gcs.external.address -}}
{{- dict "name" $gcs.external.existingSecret "key" $gcs.external.existingSecretKey | toJson -}}
{{- else -}}
{{- $own := printf "%s-gcs" (include "outrider.fullname" .) -}}
{{- dict "name" (default $own $gcs.redis.auth.existingSecret) "key" (ternary $gcs.redis.auth.existingSecretKey "redis-password" (ne $gcs.redis.auth.existingSecret "")) | toJson -}}
{{- end -}}
{{- end -}}

{{- define "outrider.caFromSecret" -}}
{{- if and (not .Values.redis.enabled) .Values.redis.external.caSecret -}}true{{- end -}}
{{- end -}}
