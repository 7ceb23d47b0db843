{{/* The pod of the Ray head. `outrider serve` runs in the same pod. */}}
{{- define "outrider.head" -}}
metadata:
  labels:
    app.kubernetes.io/instance: {{ .Release.Name }}
    app.kubernetes.io/component: head
    {{- with .Values.head.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    # With this checksum, a change of the configuration changes the specification of the pod. The value
    # ray.upgradeStrategy decides what follows.
    checksum/config: {{ include "outrider.config" . | sha256sum }}
    {{- with .Values.head.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- include "outrider.placing" (dict "root" . "group" .Values.head) | trim | nindent 2 }}
  # The autoscaler alone calls Kubernetes, to request pods.
  automountServiceAccountToken: {{ .Values.ray.autoscaling.enabled }}
  terminationGracePeriodSeconds: {{ add (mul 2 .Values.drainSeconds) 60 }}
  securityContext:
    {{- include "outrider.podSecurity" . | nindent 4 }}
  containers:
    # KubeRay expects Ray in the first container.
    - {{ include "outrider.rayHead" . | nindent 6 | trim }}
    - {{ include "outrider.serve" . | nindent 6 | trim }}
  volumes:
    {{- include "outrider.scratchVolumes" (dict "root" . "group" .Values.head) | nindent 4 }}
    {{- with include "outrider.dataVolumes" . | trim }}{{ . | nindent 4 }}{{ end }}
    - {name: state, emptyDir: {sizeLimit: {{ .Values.scratch.logs }}}}
    - name: config
      configMap:
        name: {{ include "outrider.fullname" . }}-config
{{- end -}}

{{- define "outrider.rayHead" -}}
name: ray-head
image: {{ include "outrider.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
env:
  {{- include "outrider.rayEnv" . | nindent 2 }}
  {{- with include "outrider.redisEnv" . | trim }}{{ . | nindent 2 }}{{ end }}
ports:
  - {name: gcs, containerPort: 6379}
  - {name: dashboard, containerPort: 8265}
  - {name: client, containerPort: 10001}
lifecycle:
  preStop:
    exec:
      # `outrider serve` holds this lock until it has stopped its actors. Ray has to run until then.
      command:
        - /usr/bin/flock
        - --timeout
        - {{ add (mul 2 .Values.drainSeconds) 30 | quote }}
        - /var/lib/outrider/deployment.lock
        - /bin/true
resources:
  {{- toYaml .Values.head.resources | nindent 2 }}
securityContext:
  {{- include "outrider.containerSecurity" . | nindent 2 }}
volumeMounts:
  {{- include "outrider.scratchMounts" . | nindent 2 }}
  - {name: state, mountPath: /var/lib/outrider}
{{- end -}}

{{/* The container that runs `outrider serve`; Kubernetes restarts it if it ends. It has no readiness
probe: workers find Ray only when the head's pod is ready, and `serve` is ready only with workers. */}}
{{- define "outrider.serve" -}}
name: outrider
image: {{ include "outrider.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
command:
  - /bin/bash
  - -c
  - |-
    trap 'exit 0' TERM
    until ray health-check --address 127.0.0.1:6379 >/dev/null 2>&1; do sleep 2; done
    exec outrider serve --address 127.0.0.1:6379 --config /etc/outrider/config.yaml
env:
  {{- include "outrider.rayEnv" . | nindent 2 }}
  {{- include "outrider.modelEnv" . | trim | nindent 2 }}
  - name: OUTRIDER_STATE_DIR
    value: /var/lib/outrider
  {{- if .Values.ray.auth.enabled }}
  - name: RAY_AUTH_MODE
    value: token
  - name: RAY_AUTH_TOKEN
    valueFrom:
      secretKeyRef:
        # By default the operator makes this Secret, with the name of the cluster.
        name: {{ default (include "outrider.fullname" .) .Values.ray.auth.secret }}
        key: auth_token
  {{- end }}
  {{- with include "outrider.redisEnv" . | trim }}{{ . | nindent 2 }}{{ end }}
  {{- with .Values.huggingFace.tokenSecret }}
  - name: HF_TOKEN
    valueFrom:
      secretKeyRef:
        name: {{ . }}
        key: {{ $.Values.huggingFace.tokenKey }}
  {{- end }}
resources:
  {{- toYaml .Values.head.serve.resources | nindent 2 }}
securityContext:
  {{- include "outrider.containerSecurity" . | nindent 2 }}
volumeMounts:
  {{- include "outrider.scratchMounts" . | nindent 2 }}
  {{- with include "outrider.dataMounts" (dict "root" . "readOnly" false) | trim }}{{ . | nindent 2 }}{{ end }}
  - {name: state, mountPath: /var/lib/outrider}
  - name: config
    mountPath: /etc/outrider/config.yaml
    subPath: config.yaml
    readOnly: true
{{- end -}}
