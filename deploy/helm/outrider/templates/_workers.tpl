{{/* One group of Ray workers. Takes the root, the group's name and its values. */}}
{{- define "outrider.workerGroup" -}}
{{- $pods := int (include "outrider.pods" .group) -}}
{{- if or (lt $pods (int .group.minPods)) (gt $pods (int .group.maxPods)) -}}
{{- fail (printf "%s: its replicas need %d pods, but minPods is %d and maxPods is %d" .name $pods (int .group.minPods) (int .group.maxPods)) -}}
{{- end -}}
{{- if and .root.Values.telemetry.prometheusPort (gt (int (default 1 .group.slots)) (int (default 1 .group.ranks))) -}}
{{- fail (printf "%s.slots: replicas that share a pod cannot all have telemetry.prometheusPort; use telemetry.otlp" .name) -}}
{{- end -}}
groupName: {{ .name }}
replicas: {{ $pods }}
minReplicas: {{ .group.minPods }}
maxReplicas: {{ .group.maxPods }}
rayStartParams:
  # Each actor of this role needs 1 of this resource, so Ray places it in one of these pods.
  resources: '"{\"{{ include "outrider.resource" .name }}\": {{ default 1 .group.slots }}}"'
  # Bytes. No large objects go through Ray.
  object-store-memory: "104857600"
template:
  metadata:
    labels:
      app.kubernetes.io/instance: {{ .root.Release.Name }}
      app.kubernetes.io/component: {{ .name }}
      {{- with .group.podLabels }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    {{- with .group.podAnnotations }}
    annotations:
      {{- toYaml . | nindent 6 }}
    {{- end }}
  spec:
    {{- include "outrider.placing" . | trim | nindent 4 }}
    automountServiceAccountToken: false
    terminationGracePeriodSeconds: {{ add .root.Values.drainSeconds 30 }}
    securityContext:
      {{- include "outrider.podSecurity" . | nindent 6 }}
    containers:
      - {{ include "outrider.worker" . | nindent 8 | trim }}
    volumes:
      {{- include "outrider.scratchVolumes" . | nindent 6 }}
      {{- with include "outrider.dataVolumes" .root | trim }}{{ . | nindent 6 }}{{ end }}
      {{- with include "outrider.lockVolumes" . | trim }}{{ . | nindent 6 }}{{ end }}
{{- end -}}

{{- define "outrider.worker" -}}
name: ray-worker
image: {{ include "outrider.image" .root }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
env:
  {{- include "outrider.rayEnv" . | nindent 2 }}
  {{- include "outrider.modelEnv" .root | trim | nindent 2 }}
  {{- with include "outrider.redisEnv" .root | trim }}{{ . | nindent 2 }}{{ end }}
{{- if eq .name "coordinator" }}
ports:
  - {name: grpc, containerPort: {{ include "outrider.grpcPort" .root }}}
  - {name: http, containerPort: {{ include "outrider.httpPort" .root }}}
  - {name: health, containerPort: {{ include "outrider.healthPort" .root }}}
# A pod is ready while it has a coordinator, and Redis and a target answer that coordinator. The
# operator's liveness probe checks only Ray, as a missing coordinator is no reason to restart the pod.
# Network policies keep users from this port, so their calls do not delay the probe.
readinessProbe:
  grpc:
    port: {{ include "outrider.healthPort" .root }}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 2
{{- end }}
lifecycle:
  preStop:
    exec:
      {{- if eq .name "coordinator" }}
      # The service sends no new callers to this pod. Running requests get this time to end.
      command:
        - /bin/bash
        - -c
        - |-
          for _ in $(seq {{ .root.Values.drainSeconds }}); do
            (: < /dev/tcp/127.0.0.1/{{ include "outrider.grpcPort" .root }}) 2>/dev/null || exit 0
            sleep 1
          done
      {{- else }}
      # Coordinators that stop at the same time may still need this pod for running requests.
      command: [/bin/sleep, {{ .root.Values.drainSeconds | quote }}]
      {{- end }}
resources:
  requests:
    {{- toYaml .group.resources.requests | nindent 4 }}
  limits:
    {{- toYaml .group.resources.limits | nindent 4 }}
    {{- if .group.gpus }}
    # The operator registers this resource with Ray as a GPU.
    {{ .group.gpuResource }}: {{ .group.gpus }}
    {{- end }}
securityContext:
  {{- include "outrider.containerSecurity" . | nindent 2 }}
volumeMounts:
  {{- include "outrider.scratchMounts" . | nindent 2 }}
  {{- with include "outrider.dataMounts" (dict "root" .root "readOnly" true) | trim }}{{ . | nindent 2 }}{{ end }}
  {{- with include "outrider.lockMounts" . | trim }}{{ . | nindent 2 }}{{ end }}
{{- end -}}
